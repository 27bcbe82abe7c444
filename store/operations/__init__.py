"""Operations on a whole store or on some of its sessions.

The control log of a deployment's proxies (``control.py``), copies and backups (``copying.py``),
forgetting (``retention.py``), and the leases of the feed's consumers (``leases.py``).
"""
