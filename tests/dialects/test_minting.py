"""Every value that a reply carries names its call, whatever a harness does to it on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import Minted
from bridle.store.records import new_id


@pytest.mark.parametrize("index", [0, 7, 99, 100, 4711])
def test_every_minted_value_gives_its_call_id_and_index_back(index: int) -> None:
    call_id = new_id("call")
    minted = Minted(call_id, 0, f"resp_{call_id.removeprefix('call_')}", "m")

    for value in (
        minted.item_id("msg", index),
        minted.item_id("fc", index),
        minted.tool_call_id(index),
        minted.tool_call_id(index, "toolu"),
        minted.signature(index),
        minting.as_base64(minted.signature(index)),
    ):
        assert minting.read(value) == minting.MintedId(call_id, index)
    assert minting.read(minted.response_id) == minting.MintedId(call_id, None)


@pytest.mark.parametrize(
    "echoed",
    [
        "{call}|{item}",
        "run_shell_command__{call}",
        "fc-{call}",
        "{call}:retry",
    ],
)
def test_joined_and_prefixed_values_still_name_their_call(echoed: str) -> None:
    call_id = new_id("call")
    minted = Minted(call_id, 0, "", "m")
    value = echoed.format(call=minted.tool_call_id(3), item=minted.item_id("fc", 4))

    assert minting.call_id_of(value) == call_id


def test_url_safe_base64_without_the_plain_alphabet_is_read() -> None:
    from base64 import urlsafe_b64encode

    call_id = new_id("call")
    signature = Minted(call_id, 0, "", "m").signature(1)

    assert minting.call_id_of(urlsafe_b64encode(signature.encode()).decode()) == call_id


def test_a_tool_name_of_the_same_shape_does_not_hide_the_call() -> None:
    call_id = new_id("call")
    value = f"mcp_abcdefghijklmnopqrstuvwx__{call_id}00"

    assert minting.call_id_of(value) == call_id


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "call_A1b2C3d4E5f6G7h8I9j0K1l2",
        "toolu_01A09q90qw90lq917835lq9",
        "msg_00000000-0000-7000-8000-000000000000",
        "x" * 100,
        "ErUBCkYIBRgCIkDh7s/" * 40,
    ],
)
def test_foreign_values_are_not_ours(foreign: str) -> None:
    assert minting.read(foreign) is None


def test_call_ids_are_distinct_and_in_order() -> None:
    first, second = new_id("call"), new_id("call")

    assert minting.call_ids([f"fc_{second[5:]}01", "other", f"{first}00", f"{second}00"]) == (
        second,
        first,
    )


@given(st.text(max_size=600))
def test_any_text_is_read_without_an_error(value: str) -> None:
    minted = minting.read(value)

    assert minted is None or minted.call_id.startswith("call_")
