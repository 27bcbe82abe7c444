"""Reference implementations and helpers that several test files share."""
