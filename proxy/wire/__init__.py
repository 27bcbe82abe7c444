"""The values that the rooms of the proxy hand to each other, and their codecs.

``canonical`` has the one request and the one event stream that every dialect is translated to and
from; ``fold`` turns events into a whole reply; ``sse``, ``cut_ids`` and ``minting`` read bytes;
``types`` has the types of messages examined before threads use them.
"""
