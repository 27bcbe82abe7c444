"""Cases of estimators and losses, and the sessions that each needs to learn a task."""
