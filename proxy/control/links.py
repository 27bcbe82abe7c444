"""Base URLs and environment variables that point a harness at its session."""

from __future__ import annotations

from collections.abc import Mapping


def base_urls(proxy_url: str, session: str) -> dict[str, str]:
    """What each provider's client takes as its base URL, for a session's id or name."""
    root = f"{proxy_url.rstrip('/')}/s/{session}"
    return {"openai": f"{root}/v1", "anthropic": root, "google": root}


def environment(urls: Mapping[str, str], key: str) -> dict[str, str]:
    """What harnesses and official clients read at their start. ``ANTHROPIC_API_KEY`` is left out:
    Claude Code complains when it finds both forms of a credential."""
    return {
        "OPENAI_BASE_URL": urls["openai"],
        "OPENAI_API_BASE": urls["openai"],
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": urls["anthropic"],
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": urls["google"],
        "GEMINI_API_KEY": key,
    }
