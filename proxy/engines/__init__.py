"""The engines that serve a model: their connections, the choice among them, and their replies.

A call goes ``models`` (choose a ``pool``) → ``rendering`` (the form and the exact prompt that the
model's template takes) → ``request`` (encode) → ``stream`` (choose an ``engine``, send, retry,
follow) → ``reply`` (decode to canonical events). Each engine has its connections (``transport``),
its ``circuit`` and the ``weights`` that it serves.
"""
