"""What is done with a whole store, or with sessions of it.

Copies and backups (``copying.py``), forgetting (``retention.py``), and the leases of the feed's
consumers (``leases.py``).
"""
