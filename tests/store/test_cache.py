from bridle.store.encoding.bodies import Earlier
from bridle.store.writing.cache import CachedSession, SessionCache


def grown() -> CachedSession:
    session = CachedSession()
    session.remember_request("call_1", Earlier(b"x" * 100, 0))
    return session


def test_sessions_longest_out_of_use_make_room():
    cache = SessionCache(limit=2 * grown().size)
    for name in ("a", "b", "a", "c"):
        cache.get(name, grown)
        cache.settle(name)
    loaded = []
    for name in ("a", "c", "b"):
        cache.get(name, lambda name=name: loaded.append(name) or grown())
    assert loaded == ["b"]
    assert cache.size == 2 * grown().size
