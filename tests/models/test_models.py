"""Genuine tokenizers and templates: every family continues exactly and is judged rightly."""

from __future__ import annotations

import pytest

from bridle.bench.families import FAMILIES, model_directory
from bridle.bench.models import measure_directory
from bridle.recipes.models.packages import PackageNotFetched, cache_directory

pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]

MATERIAL = cache_directory()
"""The user's own cache, read before the tests hide it: what was fetched is kept between runs."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_of_the_family_is_one_line_and_its_verdict_is_right(name: str) -> None:
    try:
        directory = model_directory(name, MATERIAL)
    except PackageNotFetched as error:
        pytest.skip(str(error))
    found = measure_directory(directory, FAMILIES[name])
    exact = found["exact"]
    assert found["verdict_wrong"] == []
    assert found["differences"] == []
    assert exact["errors"] == []
    assert exact["unexplained"] == 0
    assert (exact["rows_per_session"], exact["breaks"]) == (1.0, 0)
    assert found["rendered"]["unexplained"] == 0
