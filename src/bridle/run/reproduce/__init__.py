"""``bridle reproduce``: an installed coding agent trained on tasks that a check in its workspace
decides."""
