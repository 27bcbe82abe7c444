"""``bridle reproduce``: train an installed coding agent on tasks that a check in its workspace
decides."""
