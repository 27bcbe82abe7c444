"""The client's side over ASGI: routes, the body in, bytes out, and whether the client is there.

Nothing here knows of sessions, engines or the store.
"""
