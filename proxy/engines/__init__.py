"""The engines that serve a model: their connections, the choice among them, and their replies.

A call goes ``pool`` (choose an ``engine``) → ``request`` (encode) → ``stream`` (send, retry,
follow) → ``reply`` (decode to canonical events). Each engine has its connections (``transport``),
its ``circuit``, the ``weights`` that it serves and the result of comparing its ``rendering``.
"""
