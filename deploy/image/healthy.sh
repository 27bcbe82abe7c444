#!/bin/sh
# Whether the server at $1 answers. A container that shares another's network keeps the old one when
# the other dies and comes back: nothing reaches it there, so it ends, and is started in the new one.
[ -e /sys/class/net/eth0 ] || { kill 1; exit 1; }
exec python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)' "$1"
