"""``--rules``: the defaults of each command that takes it, and a value's own settings."""

from __future__ import annotations

import pytest
import typer

from bridle.cli.rules import sample_rules


def test_only_exports_as_messages_train_replies_to_images_by_default() -> None:
    messages = sample_rules("{}", imitation=True, messages=True)
    assert (messages.samplers, messages.media) == ("any", True)
    assert not sample_rules("{}", imitation=True).media
    assert not sample_rules("{}").media


def test_the_settings_of_the_value_come_first() -> None:
    given = sample_rules('{"media": false, "samplers": "scored"}', imitation=True, messages=True)
    assert (given.samplers, given.media) == ("scored", False)
    with pytest.raises(typer.Exit):
        sample_rules('{"pictures": true}')
