"""Test the environment that a harness inherits, and the names that it may inherit."""

from __future__ import annotations

import pytest

from bridle.harnesses.environment import allowed, redirected

SECRETS = [
    *("OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "CODEX_HOME", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"),
    *("BRIDLE_ADMIN_KEY", "GITHUB_TOKEN", "DB_SECRET", "openai_api_key", "PGPASSWORD"),
    *("DATABASE_URL", "SSH_AUTH_SOCK", "PRIVATE_KEY", "DOCKER_HOST", "MYSQL_PWD", "KUBECONFIG"),
    *("HTTPS_PROXY", "XDG_RUNTIME_DIR", "ANYTHING"),
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_sandbox_gets_no_variable_that_is_not_allowed(name: str) -> None:
    assert allowed({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["PATH", "HOME", "LANG", "LC_ALL", "TERM", "TZ", "PYTHONPATH"])
def test_the_places_of_programs_the_language_and_the_time_zone_stay(name: str) -> None:
    assert allowed({name: "x"}) == {name: "x"}


def test_a_variable_that_the_user_names_stays() -> None:
    named = {"BRIDLE_SANDBOX_ENV": "MINE, OTHER", "MINE": "1", "OTHER": "2", "THIRD": "3"}
    assert allowed(named) == {"MINE": "1", "OTHER": "2"}


def test_the_machines_http_proxy_is_never_asked_for_loopback() -> None:
    theirs = {"HTTPS_PROXY": "http://corp:3128", "no_proxy": "corp.example"}
    kept = allowed({**theirs, "BRIDLE_SANDBOX_ENV": "HTTPS_PROXY,no_proxy"})

    assert kept["HTTPS_PROXY"] == "http://corp:3128"
    assert kept["NO_PROXY"] == kept["no_proxy"] == "corp.example,127.0.0.1,localhost,::1"


def test_a_persons_own_environment_keeps_all_but_what_would_win_over_the_session() -> None:
    theirs = {"ANTHROPIC_API_KEY": "own", "GITHUB_TOKEN": "own", "OPENAI_API_KEY": "own"}

    assert redirected(theirs, {"OPENAI_API_KEY": "session"}) == {
        "GITHUB_TOKEN": "own",
        "OPENAI_API_KEY": "session",
    }
