"""Provider wire APIs as pure translators between bytes and canonical requests and events.

Each provider has a folder with the same parts: ``request`` and ``history`` for the client's
requests, ``reply`` and ``stream`` for the replies to it. ``registry`` puts them together as the
dialects.
"""
