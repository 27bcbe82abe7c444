"""The data routes: from a request's bytes to an admitted call, and the call itself.

:class:`bridle.proxy.calls.call.Call` owns a call's notes, policy and status from its admission to
the commit of its record; :class:`bridle.proxy.calls.data_plane.DataPlane` admits it.
"""
