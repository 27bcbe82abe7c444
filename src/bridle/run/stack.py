"""A stack: an engine that serves a policy and the proxy in front of it, while a command runs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bridle.engine.contract import contract
from bridle.engine.contract.client import EngineClient
from bridle.engine.vllm import VllmControl
from bridle.errors import BridleError
from bridle.keys import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    UPSTREAM_KEY_VARIABLE,
    VLLM_KEY_VARIABLE,
)
from bridle.run.config import ServicesConfig
from bridle.run.environment import EngineKind, admin_key_for, default_proxy, key_in
from bridle.run.services import Service
from bridle.store.records import DEFAULT_POLICY

MODEL = "policy"
VLLM_START_S = 900.0
"""Seconds for vLLM to start. It takes a minute on an idle machine, and much longer on a busy
one."""
_PATIENCE_S: Final = 60.0
"""Seconds to wait for a reply. The first request to a proxy's control API loads the API, on a
machine that may be busy starting everything else."""


class StackError(BridleError):
    """The engine or proxy did not answer, or refused; the message names which, and its address."""

    retryable = True


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses and keys of a running engine and proxy."""

    engine_url: str
    proxy_url: str
    more_engines: tuple[str, ...] = ()
    """The base URLs of further engines that serve the same policy."""
    policy: str = DEFAULT_POLICY
    """The name of the policy that these engines serve."""
    kind: EngineKind = "embedded"
    engine_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)

    def engine(self, url: str | None = None) -> EngineClient:
        """Return a client of the engine at ``url``, or else of the first one."""
        client = VllmControl if self.kind == "vllm" else EngineClient
        return client(url or self.engine_url, api_key=self.engine_key)

    def announce(self, version: int, engine: str | None = None) -> None:
        """Set the policy version that an engine serves from now on.

        The engine is the one at the URL ``engine``, or else the only one. The version may be an
        earlier one, if a publish was taken back.
        """
        url = engine or self.engine_url
        if self.kind == "vllm":
            with VllmControl(url, api_key=self.engine_key) as control:
                control.stamp(version)
        self._publish(version, engine=engine)

    def announce_lora(self, version: int, model: str) -> None:
        """Set the policy version from now on, and the name under which the engine serves it."""
        self._publish(version, model=model)

    def retract(self, version: int) -> None:
        """Set the proxy back to ``version`` for all engines."""
        self._publish(version)

    def version(self) -> int:
        """Return the policy version that the proxy records with calls now."""
        state = self._policy("GET").json()
        named = None if self.policy == DEFAULT_POLICY else self.policy
        return int(state["version"] if named is None else state["policies"][named])

    def _publish(self, version: int, **fields: Any) -> None:
        named = {} if self.policy == DEFAULT_POLICY else {"policy": self.policy}
        self._policy("PUT", json={"version": version, "back": True, **named, **fields})

    def _policy(self, method: str, **body: Any) -> httpx.Response:
        url = f"{self.proxy_url}/bridle/v1/policy"
        return _asked("proxy", method, url, self.admin_key, **body)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that a run starts for its policies."""

    kind: EngineKind = "embedded"
    arguments: tuple[str, ...] = ()
    """Further options of ``bridle engine``."""
    lora_rank: int | None = None
    """The rank of the adapters that it serves, or ``None`` if it serves whole models. It must be a
    vLLM."""

    def options(self, policies: int) -> list[str]:
        """Return the options of ``bridle engine`` with which it serves that many policies."""
        if self.lora_rank is None:
            return list(self.arguments)
        # Two versions of each policy meet in a publish.
        sizes = {"lora_rank": self.lora_rank, "lora_adapters": 2 * policies}
        return [*(f"--set={name}={size}" for name, size in sizes.items()), *self.arguments]


def kind_of(engine_url: str, key: str | None = None) -> EngineKind:
    """Return the kind of engine at ``engine_url``; only Bridle's own reports a policy version."""
    reply = _asked("engine", "GET", f"{engine_url}{contract.VERSION}", key)
    return "embedded" if "policy_version" in reply.json() else "vllm"


def running_stack(services: ServicesConfig) -> Stack:
    """Return the stack of services that are running, with the keys of the environment.

    Raise :class:`StackError` if the first engine does not answer.
    """
    proxy_url = services.proxy_url or default_proxy()
    first, *more = services.engine_urls
    engine_key = key_in(API_KEY_VARIABLE)
    return Stack(
        first,
        proxy_url,
        more_engines=tuple(more),
        kind=kind_of(first, engine_key),
        engine_key=engine_key,
        admin_key=admin_key_for(proxy_url),
    )


def _asked(service: str, method: str, url: str, key: str | None, **body: Any) -> httpx.Response:
    """Return the reply of ``service``. Raise :class:`StackError` if there is none, or an error."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.request(
            method, url, headers=headers, trust_env=False, timeout=_PATIENCE_S, **body
        )
    except httpx.HTTPError as error:
        raise StackError(f"the {service} does not answer at {url}: {error}") from error
    if reply.is_error:
        raise StackError(f"the {service} answered {reply.status_code} at {url}: {reply.text[:300]}")
    return reply


@contextmanager
def stack(
    policy: Path,
    store: str,
    logs: Path,
    *,
    version: int = 0,
    engine: EngineKind = "embedded",
    engine_arguments: Sequence[str] = (),
) -> Iterator[Stack]:
    """Run an engine that serves ``policy`` as ``version``, and a proxy in front of it.

    The proxy records to ``store``. Both ask for keys that are made here.
    """
    with stacks(
        {DEFAULT_POLICY: policy},
        {},
        store,
        logs,
        version=version,
        engine=EngineChoice(engine, tuple(engine_arguments)),
    ) as running:
        yield running[DEFAULT_POLICY]


@contextmanager
def stacks(
    policies: Mapping[str, Path],
    roles: Mapping[str, str],
    store: str,
    logs: Path,
    *,
    version: int = 0,
    engine: EngineChoice,
    host: str = "127.0.0.1",
) -> Iterator[dict[str, Stack]]:
    """Run an engine for each of ``policies``, and one proxy in front of all, like :func:`stack`.

    ``policies`` are model directories by name, :data:`DEFAULT_POLICY`'s among them. ``roles`` maps
    each role that does not use that policy to its own. With ``engine.lora_rank``, one engine serves
    the default policy's model, and the adapters of all policies. Yield the stack of each policy, by
    name.
    """
    key = new_key()
    own = dict(policies)
    if engine.lora_rank is not None:
        own = {DEFAULT_POLICY: policies[DEFAULT_POLICY]}
    with ExitStack() as opened:
        urls = {
            name: opened.enter_context(
                engine_service(
                    engine.kind,
                    path,
                    logs if name == DEFAULT_POLICY else logs / name,
                    engine.options(len(policies)),
                    key=key,
                )
            ).url
            for name, path in own.items()
        }
        urls = {name: urls.get(name, urls[DEFAULT_POLICY]) for name in policies}
        others = {name: [urls[name]] for name in policies if name != DEFAULT_POLICY}
        further = ["--set", f"policies={_toml(others)}", "--set", f"role_models={_toml(roles)}"]
        first = urls[DEFAULT_POLICY]
        proxy_url, admin_key = opened.enter_context(
            proxy(first, policies[DEFAULT_POLICY], store, logs, key=key, host=host, further=further)
        )
        running = {
            name: Stack(
                url, proxy_url, policy=name, kind=engine.kind, engine_key=key, admin_key=admin_key
            )
            for name, url in urls.items()
        }
        for name in own:
            running[name].announce(version)
        yield running


def _toml(values: Mapping[str, Any]) -> str:
    """Return texts, or lists of them, as an inline table."""
    pairs = (
        f"{json.dumps(key, ensure_ascii=False)} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
    )
    return f"{{{', '.join(pairs)}}}"


@contextmanager
def recording(
    engine_url: str,
    kind: EngineKind,
    policy: Path,
    store: str,
    logs: Path,
    *,
    version: int = 0,
    key: str | None = None,
) -> Iterator[Stack]:
    """Run a proxy in front of an engine that serves ``policy`` as ``version``.

    The engine asks for ``key``.
    """
    with proxy(engine_url, policy, store, logs, key=key) as (proxy_url, admin_key):
        running = Stack(engine_url, proxy_url, kind=kind, engine_key=key, admin_key=admin_key)
        running.announce(version)
        yield running


def new_key() -> str:
    """Return a key for the servers of one run, with 256 random bits."""
    return secrets.token_urlsafe(32)


def serve_instead(engine_url: str, policy: Path, *, key: str | None = None) -> None:
    """Make a running engine serve other weights of the same shape."""
    with EngineClient(engine_url, api_key=key) as engine:
        engine.pause("wait")
        try:
            engine.reload_weights(policy)
        finally:
            engine.resume()


def engine_service(
    kind: EngineKind,
    policy: Path,
    logs: Path,
    further: Sequence[str] = (),
    *,
    key: str | None = None,
) -> Service:
    """Return ``bridle engine KIND`` as a service for ``policy``, on a port of its own.

    It asks for ``key``.

    ``further`` are options of that command.
    """
    arguments = ["engine", kind, "--model", str(policy), "--served-model-name", MODEL]
    arguments += ["--port", "0", *further]
    log = logs / "engine.log"
    if kind == "vllm":
        arguments += ["--run-dir", str(logs / "vllm")]
        return Service(arguments, log, {VLLM_KEY_VARIABLE: key}, start_timeout_s=VLLM_START_S)
    return Service(arguments, log, {API_KEY_VARIABLE: key})


@contextmanager
def proxy(
    engine_url: str,
    tokenizer: Path | None,
    store: str,
    logs: Path,
    *,
    key: str | None = None,
    host: str = "127.0.0.1",
    further: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Run a proxy on a port of its own, in front of ``engine_url``, which asks for ``key``.

    Yield the proxy's base URL and the admin key that it asks for. Without a ``tokenizer``, it is
    that which the engine names. ``further`` are options of ``bridle proxy``.
    """
    arguments = ["proxy", "--upstream", engine_url]
    arguments += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    arguments += ["--store", store, "--host", host, "--port", "0", *further]
    admin_key = new_key()
    keys = {ADMIN_KEY_VARIABLE: admin_key, UPSTREAM_KEY_VARIABLE: key}
    with Service(arguments, logs / "proxy.log", keys) as service:
        yield service.url, admin_key
