"""Test the environment that a harness inherits, and the names that it must not inherit."""

from __future__ import annotations

import pytest

from bridle.harnesses.environment import redirected, scrubbed

SECRETS = [
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_BASE_URL",
    "CLAUDE_CONFIG_DIR",
    "CODEX_HOME",
    "GEMINI_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_SECRET_ACCESS_KEY",
    "LANGSMITH_TRACING",
    "BRIDLE_ADMIN_KEY",
    "HF_TOKEN",
    "GITHUB_TOKEN",
    "MY_TOOL_API_KEY",
    "DB_SECRET",
    "openai_api_key",
]


@pytest.mark.parametrize("name", SECRETS)
def test_provider_settings_and_secrets_are_scrubbed(name: str) -> None:
    assert scrubbed({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["PATH", "HOME", "LANG", "TOKENIZERS_PARALLELISM", "HF_HOME"])
def test_what_is_no_secret_stays(name: str) -> None:
    assert scrubbed({name: "x"}) == {name: "x"}


def test_the_machines_http_proxy_is_never_asked_for_loopback() -> None:
    kept = scrubbed({"HTTPS_PROXY": "http://corp:3128", "no_proxy": "corp.example"})

    assert kept["HTTPS_PROXY"] == "http://corp:3128"
    assert kept["NO_PROXY"] == kept["no_proxy"] == "corp.example,127.0.0.1,localhost,::1"


def test_a_persons_own_environment_keeps_all_but_what_would_win_over_the_session() -> None:
    theirs = {"ANTHROPIC_API_KEY": "own", "GITHUB_TOKEN": "own", "OPENAI_API_KEY": "own"}

    assert redirected(theirs, {"OPENAI_API_KEY": "session"}) == {
        "GITHUB_TOKEN": "own",
        "OPENAI_API_KEY": "session",
    }
