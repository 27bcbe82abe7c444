"""The engines that serve a model: their connections, the choice among them, and their replies.

A call goes ``pool`` (choose) → ``request`` (encode) → ``stream`` (send, retry, follow) → ``reply``
(decode to canonical events) over a :mod:`bridle.proxy.engines.transport`.
"""
