"""What the writer forgets of a session is let go of at once, not when the collector comes by."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from bridle.store.records import Choice, VersionRun
from bridle.store.tree import TokenTree
from bridle.store.writing.cache import CachedSession, SessionCache


def grown(session_id: str) -> CachedSession:
    tree = TokenTree(session_id)
    prompt = np.arange(10, dtype=np.uint32)
    sampled = Choice(prompt[:3], -np.ones(3, dtype=np.float32), (VersionRun(0, 0),), "stop")
    tree.grow("call_1", prompt, [sampled])
    return CachedSession(tree)


def test_a_forgotten_session_leaves_no_garbage_behind():
    cache = SessionCache(limit=1)
    gc.disable()
    try:
        tree = cache.get("a", lambda: grown("a")).tree
        spans = [node for node in tree.nodes.values() if node.parent is not None]
        held = [weakref.ref(node.token_ids) for node in spans]
        assert len(held) == 2
        del spans
        del tree
        cache.settle("a")
        assert [ids() for ids in held] == [None, None]
    finally:
        gc.enable()


def test_sessions_longest_out_of_use_make_room():
    one = grown("x").size
    cache = SessionCache(limit=2 * one)
    for name in ("a", "b", "a", "c"):
        cache.get(name, lambda name=name: grown(name))
        cache.settle(name)
    loaded = []
    for name in ("a", "c", "b"):
        cache.get(name, lambda name=name: loaded.append(name) or grown(name))
    assert loaded == ["b"]
    assert cache.size == 2 * one
