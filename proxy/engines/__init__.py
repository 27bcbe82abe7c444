"""The engines that serve a model: connections, replies as canonical events, which engine is asked.

A call goes ``pool`` (choose) → ``request`` (encode) → ``stream`` (send, retry, follow) → ``reply``
(decode) over a :mod:`bridle.proxy.engines.transport`.
"""
