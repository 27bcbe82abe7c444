"""Packing of samples into the tokens of a forward pass, with each shared prefix computed once.

A *pack* is a forest of tokens. Every token knows its parent (the token before it on its branch) and
its position (its depth), attends to its ancestors and itself only, and so gets the hidden state
that it would get if its branch were alone in the model. Branches of one session share their common
prefix; so do sessions with the same system prompt, tools, question, or sampled tokens.

Trained tokens are kept beside the forest as *targets*: "the model's output at token ``source`` is
to predict ``target``, which is token ``offset`` of sample ``sample``". Two samples may train the
same token of the forest, each with its own advantage. ``offset`` is the index in the sample:
token ``t`` is predicted from ``token_ids[:t]``, so its source is the forest's copy of token
``t - 1``. Tokens behind a sample's last trained one are not computed.

Tokens stand in depth-first order: a subtree is a contiguous range, and every ancestor of a token in
a range that lies before the range is an ancestor of the range's first token
(:mod:`bridle.trainer.batch.attention` rests on this).

Shared-prefix training: Tree Training (arXiv 2511.00413); AReaL's tree attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.store.records import TokenIds
from bridle.store.tree import common_prefix
from bridle.trainer.config import Layout, PackingConfig

Index = NDArray[np.int64]


class TokenSequence(Protocol):
    """The attributes of a sample that packing needs."""

    @property
    def token_ids(self) -> TokenIds:
        """``uint32[T]``"""

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``bool[T]``: token ``t`` is trained, predicted from ``token_ids[:t]``."""


class RoutedSequence(TokenSequence, Protocol):
    """A sequence whose experts may be recorded."""

    @property
    def routed_experts(self) -> NDArray[np.int16] | None:
        """``int16[T, layers, top_k]``: the experts behind each token; -1 where not known."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The tokens of one forward pass (``N``) and the targets that they predict (``M``)."""

    layout: Layout
    token_ids: Index
    """``int64[N]``"""
    positions: Index
    """``int64[N]``: depth in the branch, from 0."""
    parents: Index
    """``int64[N]``: index of the token before it on its branch, -1 at a root; always smaller than
    the token's own index."""
    sources: Index
    """``int64[M]``: the token whose output predicts the target."""
    targets: Index
    """``int64[M]``: the token id to predict."""
    samples: Index
    """``int64[M]``: index of the trained sample among the packed sequences."""
    offsets: Index
    """``int64[M]``: index of the token in its sample; ``targets == token_ids[offsets]`` of that
    sample."""
    unshared_tokens: int
    """Number of tokens that the same samples take one after another, without sharing or padding."""
    routed_experts: NDArray[np.int16] | None = None
    """``int16[N, layers, top_k]``: the experts that the engine chose for each token, -1 where they
    are not known; ``None`` if no sample has any."""


IDLE: Final = Pack(
    layout="padded",
    token_ids=np.zeros(1, np.int64),
    positions=np.zeros(1, np.int64),
    parents=np.full(1, -1, np.int64),
    sources=np.zeros(1, np.int64),
    targets=np.zeros(1, np.int64),
    samples=np.zeros(1, np.int64),
    offsets=np.ones(1, np.int64),
    unshared_tokens=1,
)
"""The smallest pack that a model can compute."""


def computed_tokens(pack: Pack) -> int:
    return len(pack.token_ids)


def longest_branch(pack: Pack) -> int:
    """Return the number of tokens of the longest branch that is computed."""
    return int(pack.positions.max()) + 1


def trained_length(sequence: TokenSequence) -> int:
    """Return the number of tokens that must be computed to train ``sequence``.

    They are all tokens before its last trained one. Raises ``ValueError`` if token 0 is trained,
    because nothing precedes it.
    """
    trained = np.flatnonzero(sequence.mask)
    if len(trained) == 0:
        return 0
    if trained[0] == 0:
        raise ValueError("token 0 cannot be trained: there is nothing to predict it from")
    return int(trained[-1])


def make_packs(sequences: Sequence[TokenSequence], config: PackingConfig) -> list[Pack]:
    """Pack ``sequences``; those without a trained token are left out.

    A pack has at most ``config.max_tokens``. A sequence that is longer by itself has a pack of its
    own. In the ``tree`` layout its relatives may join this pack until it is twice as long:
    sequences that share more tokens with it than they add.
    """
    branches = _branches(sequences)
    occupied = [i for i, branch in enumerate(branches) if len(branch)]
    if config.layout == "tree":
        return [
            _tree_pack(sequences, branches, indices)
            for indices in _tree_bins(branches, occupied, config.max_tokens)
        ]
    bins = _plain_bins(branches, occupied, config)
    return [_chain_pack(sequences, branches, indices, config.layout) for indices in bins]


def _branches(sequences: Sequence[TokenSequence]) -> list[Index]:
    return [
        np.asarray(sequence.token_ids[: trained_length(sequence)], dtype=np.int64)
        for sequence in sequences
    ]


def _sort_key(branch: Index) -> bytes:
    """Return a key whose byte order is the lexicographic order of the ids."""
    return branch.astype(">u4").tobytes()


def _tree_bins(
    branches: Sequence[Index], occupied: Sequence[int], max_tokens: int
) -> Iterator[list[int]]:
    """Yield bins of branches in lexicographic order, so that neighbours share most.

    A bin ends where the budget ends, so a tree larger than the budget is cut between two branches.
    Behind a prompt longer than the budget no two branches would fit together, and each would
    compute the prompt again. A bin that begins with such a branch therefore grows with its
    relatives.
    """
    current: list[int] = []
    size = room = 0
    for i in sorted(occupied, key=lambda i: _sort_key(branches[i])):
        own = len(branches[i])
        shared = common_prefix(branches[current[-1]], branches[i]) if current else 0
        added = own - shared
        fits = size + added <= room and (room == max_tokens or shared > added)
        if current and not fits:
            yield current
            current, size, added = [], 0, own
        if not current:
            room = max_tokens if own <= max_tokens else 2 * own
        current.append(i)
        size += added
    if current:
        yield current


def _plain_bins(
    branches: Sequence[Index], occupied: Sequence[int], config: PackingConfig
) -> Iterator[list[int]]:
    """Yield bins of branches by length; a bin ends where the budget ends.

    For ``padded``, padding counts.
    """
    current: list[int] = []
    total = 0
    for i in sorted(occupied, key=lambda i: len(branches[i])):
        length = len(branches[i])
        total += length
        # The longest comes last.
        size = length * (len(current) + 1) if config.layout == "padded" else total
        if current and size > config.max_tokens:
            yield current
            current, total = [], length
        current.append(i)
    if current:
        yield current


def _tree_pack(
    sequences: Sequence[TokenSequence], branches: Sequence[Index], indices: Sequence[int]
) -> Pack:
    """Return the prefix tree of the branches.

    The branches are in sorted order, and each adds what its predecessor lacks.
    """
    token_ids: list[Index] = []
    parents: list[Index] = []
    positions: list[Index] = []
    paths: dict[int, Index] = {}
    path = branch = np.empty(0, dtype=np.int64)
    size = 0
    for i in sorted(indices, key=lambda i: _sort_key(branches[i])):
        shared = common_prefix(branch, branches[i])
        branch = branches[i]
        fresh = np.arange(size, size + len(branch) - shared)
        token_ids.append(branch[shared:])
        positions.append(np.arange(shared, len(branch)))
        parents.append(fresh - 1)
        if len(fresh):
            parents[-1][0] = path[shared - 1] if shared else -1
        path = paths[i] = np.concatenate([path[:shared], fresh])
        size += len(fresh)
    return _with_targets(sequences, branches, paths, token_ids, positions, parents, "tree")


def _chain_pack(
    sequences: Sequence[TokenSequence],
    branches: Sequence[Index],
    indices: Sequence[int],
    layout: Layout,
) -> Pack:
    """Return a pack in which every branch is a tree of its own, one after another."""
    paths: dict[int, Index] = {}
    parents: list[Index] = []
    size = 0
    for i in indices:
        paths[i] = np.arange(size, size + len(branches[i]))
        parents.append(np.concatenate([[-1], paths[i][:-1]]))
        size += len(branches[i])
    token_ids = [branches[i] for i in indices]
    positions = [np.arange(len(branches[i])) for i in indices]
    return _with_targets(sequences, branches, paths, token_ids, positions, parents, layout)


def _with_targets(
    sequences: Sequence[TokenSequence],
    branches: Sequence[Index],
    paths: dict[int, Index],
    token_ids: Sequence[Index],
    positions: Sequence[Index],
    parents: Sequence[Index],
    layout: Layout,
) -> Pack:
    offsets = {i: np.flatnonzero(sequences[i].mask) for i in paths}
    return Pack(
        layout=layout,
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        parents=np.concatenate(parents),
        sources=np.concatenate([path[offsets[i] - 1] for i, path in paths.items()]),
        targets=np.concatenate(
            [np.asarray(sequences[i].token_ids, dtype=np.int64)[offsets[i]] for i in paths]
        ),
        samples=np.concatenate([np.full(len(offsets[i]), i) for i in paths]),
        offsets=np.concatenate([offsets[i] for i in paths]),
        unshared_tokens=sum(len(branches[i]) for i in paths),
    )


def with_routing(pack: Pack, sequences: Sequence[RoutedSequence]) -> Pack:
    """Return ``pack``, made of ``sequences``, with the experts that they were sampled with.

    A token that several sequences share has the experts of the first of them that knows them.
    """
    chosen = None
    # Target ``offset`` of a sample is predicted at ``source``, the end of the path of its prefix.
    ends = {int(one): at for at, one in enumerate(pack.samples)}
    for index in sorted(ends):
        experts = sequences[index].routed_experts
        if experts is None:
            continue
        if chosen is None:
            chosen = np.full((len(pack.token_ids), *experts.shape[1:]), -1, np.int16)
        elif chosen.shape[1:] != experts.shape[1:]:
            raise ValueError("the samples of a pack were recorded with models of different experts")
        path = _path(pack, int(pack.sources[ends[index]]))
        behind = experts[1 : len(path) + 1]
        fresh = (chosen[path, 0, 0] < 0) & (behind[:, 0, 0] >= 0)
        chosen[path[fresh]] = behind[fresh]
    return replace(pack, routed_experts=chosen)


def _path(pack: Pack, token: int) -> Index:
    """Return the tokens from the root to ``token``, ``int64[depth + 1]``."""
    before = np.arange(-1, len(pack.parents) - 1)
    starts = np.flatnonzero((pack.parents != before) | (pack.parents < 0))
    runs: list[Index] = []
    while token >= 0:
        start = int(starts[np.searchsorted(starts, token, side="right") - 1])
        runs.append(np.arange(start, token + 1))
        token = int(pack.parents[start])
    return np.concatenate(runs[::-1])
