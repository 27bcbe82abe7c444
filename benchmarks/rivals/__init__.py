"""``bridle bench rivals``: Bridle and other proxies in front of one engine, on the same traffic.

``engine`` serves replies whose token ids follow from a number in their text. ``sessions`` is the
load: agents that send their whole history with every call. ``arms`` starts a proxy and reads its
own record afterwards. ``measure`` runs rounds in which every arm has its turn, and ``page`` writes
the figures. ``install`` makes an environment for each of the others.
"""
