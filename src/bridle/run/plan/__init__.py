"""Estimate what a number of sessions an hour needs: calls, proxies, disk, engines and trainers.

A workload and a model are counted, a machine is measured or read from a data sheet, and the proxy's
cost is measured here, on sessions of that shape.
"""
