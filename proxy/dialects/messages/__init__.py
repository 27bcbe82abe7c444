"""Anthropic Messages, the API of Claude Code."""
