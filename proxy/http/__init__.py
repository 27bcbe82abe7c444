"""The client's side over ASGI.

It consists of routes, request bodies, responses, and the watch for clients that leave.

Nothing here knows of sessions, engines or the store.
"""
