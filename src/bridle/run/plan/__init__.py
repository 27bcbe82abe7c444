"""What so many sessions an hour need: calls, proxies, disk, engines, trainers.

A workload and a model are counted, a machine is measured or read from a data sheet, and the proxy's
cost is measured here, on sessions of that shape.
"""
