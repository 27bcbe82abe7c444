"""The route of a request: by its path, and on a shared path by its method and headers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridle.proxy.dialects.dialect import Action, ApiPath, sent_with
from bridle.proxy.dialects.registry import MESSAGES, served
from bridle.proxy.dialects.routes import Routes

ROUTES = Routes(served())
ANTHROPIC = {"anthropic-version": "2023-06-01"}
GEMINI = {"x-goog-api-key": "k"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "dialect", "action"),
    [
        ("POST", "/v1/chat/completions", {}, "chat", Action.GENERATE),
        ("POST", "/v1/messages/count_tokens", {}, "messages", Action.COUNT),
        ("GET", "/v1/responses/resp_1", {}, "responses", Action.STORED),
        ("GET", "/v1/models", {}, "chat", Action.MODELS),
        ("GET", "/v1/models", ANTHROPIC, "messages", Action.MODELS),
        ("GET", "/v1/models", GEMINI | ANTHROPIC, "google", Action.MODELS),
        ("GET", "/v1beta/models", ANTHROPIC, "google", Action.MODELS),
        ("GET", "/v1/models/qwen3:8b", {}, "chat", Action.MODELS),
        ("POST", "/v1/models/m:generateContent", ANTHROPIC, "google", Action.GENERATE),
        ("POST", "/v1beta/models/org/m:countTokens", {}, "google", Action.COUNT),
    ],
)
def test_a_request_has_one_route(
    method: str, path: str, headers: dict[str, str], dialect: str, action: Action
) -> None:
    route = ROUTES.find(path, method, headers)
    assert route is not None
    assert (route.dialect.name, route.at.action, route.session) == (dialect, action, None)
    inside = ROUTES.find(f"/s/a%20b{path}", method, headers)
    assert inside == route._replace(session="a b")


@pytest.mark.parametrize(
    ("method", "path", "dialect"),
    [
        ("POST", "/v1beta/models/m:embedContent", "google"),
        ("GET", "/v1/models/m:embedContent", "google"),
        ("POST", "/v1/models/m:predict", "google"),
        ("POST", "/v1/responses/compact", "responses"),
        ("POST", "/v1/messages/batches", "messages"),
        ("POST", "/v1/classify", "chat"),
        ("POST", "/s//v1/chat/completions", "chat"),
    ],
)
def test_a_path_that_is_no_route_has_the_dialect_of_its_clients(
    method: str, path: str, dialect: str
) -> None:
    assert ROUTES.find(path, method, {}) is None
    assert ROUTES.dialect_of(path).name == dialect
    assert ROUTES.nothing_at(path).message.startswith(f"nothing is served at {path}")


def test_a_base_url_that_lacks_or_doubles_v1_is_corrected() -> None:
    assert ROUTES.nothing_at("/s/a/chat/completions").message.endswith("does not add it")
    assert ROUTES.nothing_at("/v1/v1/messages").message.endswith("this client adds it")


def test_a_shared_path_goes_to_the_dialect_that_recognises_the_request() -> None:
    own = ApiPath("/v1/chat/completions", takes=sent_with("x-mine"))
    routes = Routes([replace(MESSAGES, name="mine", paths=(own,)), *served()])
    for headers, name in (({"x-mine": "1"}, "mine"), ({}, "chat")):
        route = routes.find("/v1/chat/completions", "POST", headers)
        assert route is not None
        assert route.dialect.name == name
