"""Calls that come with their place in the token tree, as a proxy's do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bridle.store.errors import RecordRejected
from bridle.store.tree import TokenTree


@dataclass
class Proxy:
    """Places calls in its own tree and has them written."""

    writer: object
    calls: object
    session: object
    tree: TokenTree = field(init=False)

    def __post_init__(self):
        self.tree = TokenTree(self.session.id)

    async def call(self, prompt, reply, *, begins=True):
        begun = self.calls.begun(self.session)
        if begins:
            self.writer.begin_call(begun)
        await self.writer.end_call(self.calls.ended(begun, prompt, reply, tree=self.tree))
        return begun.id


@pytest.fixture
async def proxy(writer, calls):
    session = calls.session()
    await writer.add(session)
    return Proxy(writer, calls, session)


async def test_a_call_is_stored_where_it_was_placed(proxy, reader):
    await proxy.call([1, 2], [3])
    second = await proxy.call([1, 2, 3, 4], [5])
    assert [len(span.token_ids) for span in reader.spans(proxy.session.id)] == [2, 1, 1, 1]
    assert reader.prompt_token_ids(second).tolist() == [1, 2, 3, 4]


async def test_a_call_that_hangs_on_one_that_could_not_be_written_is_stored_whole(proxy, reader):
    with pytest.raises(RecordRejected):
        await proxy.call([1, 2], [3], begins=False)
    second = await proxy.call([1, 2, 3, 4], [5])
    third = await proxy.call([1, 2, 3, 4, 5, 6], [7])
    assert [len(span.token_ids) for span in reader.spans(proxy.session.id)] == [4, 1, 1, 1]
    assert reader.prompt_token_ids(second).tolist() == [1, 2, 3, 4]
    assert reader.prompt_token_ids(third).tolist() == [1, 2, 3, 4, 5, 6]
