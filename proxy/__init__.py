"""The recording proxy between a harness and the engine that serves its model.

A request becomes a :class:`~bridle.proxy.wire.canonical.Request` in its provider's dialect, and its
key names the session that it belongs to. The session answers one question: which recorded call does
this one continue, and with which tokens. The engine is asked with those tokens, and its reply comes
back as canonical events. Two readers take the same events: the dialect's emitter, which writes the
client's bytes as they come, and the recording. The terminal event is held until the recording has
been committed, so that a client never knows of a call that the store does not.

The proxy never decides what a call was for, why its prompt broke or what of it is trained. That is
judged from the record, in :mod:`bridle.reconstruct`.

Its parts, from the top; each imports only those below it:

- ``app``, ``server``, ``workers``: the ASGI application, and the processes that serve it
- ``calls``: one call from admission to commit; ``control``: the control API
- ``services``, ``deployment``: what all calls share, and the rows that all proxies read
- ``recording``: the record of a call and its commit, metrics, logs, traces
- ``engines``: which engine is asked, and its reply as events
- ``continuation``: the exact prompt after an earlier call
- ``session``: sessions in memory, and the earlier call that a request continues
- ``dialects``, ``http``, ``wire``: provider APIs as pure translators, the client's side, the values
  that all parts hand to each other
"""
