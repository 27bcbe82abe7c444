"""Base URLs and environment variables that point a harness at its session."""

from __future__ import annotations

from collections.abc import Mapping


def base_urls(proxy_url: str, session: str) -> dict[str, str]:
    """Return the base URL for each provider's client, for a session's id or name."""
    root = f"{proxy_url.rstrip('/')}/s/{session}"
    return {"openai": f"{root}/v1", "anthropic": root, "google": root}


def environment(urls: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the variables that harnesses and official clients read when they start.

    ``ANTHROPIC_API_KEY`` is not set: Claude Code warns when both credentials are set.
    """
    return {
        "OPENAI_BASE_URL": urls["openai"],
        "OPENAI_API_BASE": urls["openai"],
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": urls["anthropic"],
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": urls["google"],
        "GEMINI_API_KEY": key,
    }
