"""Checks whether a running engine keeps the contract, by its behaviour rather than its flags.

Each check sends small requests and examines the replies. Settings are read only where nothing
observable depends on them. ``bridle doctor`` prints the results, and an engine that is launched or
adopted must pass the same checks.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httpx

from bridle.engine.contract import contract
from bridle.engine.vllm.flags import TRANSFER_BACKEND, WORKER, is_loopback
from bridle.engine.vllm.installation import OLDEST, version_tuple
from bridle.engine.vllm.parsers import AUTO, Parsers, parsers_for
from bridle.engine.vllm.probing import LaunchProbe, ProbeFailed, ProbeReply, refusal

CheckOutcome = Literal["ok", "failed", "unknown"]

CONTROL_REMEDY: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    outcome: CheckOutcome
    detail: str
    """A description of what the check observed."""
    remedy: str | None = None
    """The way to repair a failure."""

    @property
    def line(self) -> str:
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.outcome:<8}{self.name:<20}{self.detail}{remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Requirements on the engine beyond the contract."""

    context: int | None = None
    """Minimum number of tokens of prompt and reply together."""
    tool_parser: str | None = AUTO
    """The required tool parser: ``auto`` for the one that reads the model's markup, ``None`` for
    none."""
    reasoning_parser: str | None = AUTO
    """The required reasoning parser: ``auto`` or ``None`` as for ``tool_parser``."""
    private_network: bool = False
    """True if the engine may listen on an address other than loopback, because only trusted
    machines reach it."""
    timeout: float = 120.0
    """Seconds for one request."""


class _Failed(Exception):
    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


class _Unknown(Exception):
    """The check cannot be made here; the message states the reason."""


def check_engine(
    base_url: str, *, expect: Expectation | None = None, api_key: str | None = None
) -> list[Check]:
    """Return all checks of the engine at ``base_url`` (no ``/v1``), in the best reading order.

    No behaviour of the engine raises an error. If it does not serve at all, that is the only
    result.
    """
    expectation = expect or Expectation()
    with LaunchProbe(base_url, timeout=expectation.timeout, api_key=api_key) as probe:
        subject = _Subject(probe, expectation)
        first = _run("serves", _serves, subject)
        if first.outcome == "failed":
            return [first]
        return [first, *(_run(name, check, subject) for name, check in _CHECKS)]


def failures(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.outcome == "failed"]


class _Subject:
    """The engine under check, and data about it that several checks need."""

    def __init__(self, probe: LaunchProbe, expect: Expectation) -> None:
        self.probe = probe
        self.expect = expect
        self.card: dict[str, Any] = {}
        self.is_vllm = True
        self.is_scripted = False
        """True if a script writes its replies, so that it computes no model and draws no token."""

    @cached_property
    def greedy(self) -> ProbeReply:
        """The greedy reply, not streamed, with which others are compared."""
        return self.probe.chat()

    @cached_property
    def config(self) -> dict[str, Any]:
        """vLLM's configuration, or an empty one if it does not report it."""
        response = self.probe.get("/server_info?config_format=json")
        return {} if response.is_error else dict(response.json().get("vllm_config") or {})

    def setting(self, section: str, name: str) -> Any:
        return (self.config.get(section) or {}).get(name)

    @cached_property
    def parsers(self) -> Parsers | None:
        """The parsers it should have, or ``None`` if its model's files are not on this machine."""
        root = Path(str(self.card.get("root")))
        if not (root / "tokenizer.json").exists():
            return None
        return parsers_for(root, self.expect.tool_parser, self.expect.reasoning_parser)

    def random_prompt(self, length: int) -> list[int]:
        """Return ids that the engine is unlikely to have seen in this order."""
        ids = self.greedy.prompt_ids or [0, 1]
        return random.Random().choices(ids, k=length)


def _run(name: str, check: Callable[[_Subject], str], subject: _Subject) -> Check:
    try:
        return Check(name, "ok", check(subject))
    except _Failed as failure:
        return Check(name, "failed", str(failure), failure.remedy)
    except ProbeFailed as failure:
        return Check(name, "failed", str(failure), "see the engine's log")
    except _Unknown as reason:
        return Check(name, "unknown", str(reason))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        detail = f"a reply has not the contract's shape ({error!r})"
        return Check(name, "failed", detail, "is this an engine, or something in front of one?")


def _serves(subject: _Subject) -> str:
    probe = subject.probe
    try:
        health = probe.get(contract.HEALTH)
    except ProbeFailed as error:
        raise _Failed(str(error), f"is an engine running at {probe.base_url}?") from error
    if health.is_error:
        raise _Failed(
            f"{contract.HEALTH} answers {health.status_code}", "wait for it, or restart it"
        )
    cards = probe.get_json(contract.MODELS).get("data")
    if not cards:
        raise _Failed(f"{contract.MODELS} lists no model", "serve one")
    subject.card, probe.model = cards[0], cards[0]["id"]
    version = probe.get_json(contract.VERSION)
    subject.is_vllm = "policy_version" not in version
    subject.is_scripted = version.get("samples") is False
    number = str(version.get("version"))
    if subject.is_vllm and version_tuple(number) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise _Failed(f"vLLM {number}", f"at least {oldest} is needed")
    if subject.is_scripted:
        return f"a scripted engine plays {probe.model!r}: its tokens are no policy's"
    name = "vLLM" if subject.is_vllm else "engine"
    return f"{name} {number} serves {probe.model!r}"


def _context(subject: _Subject) -> str:
    length, needed = subject.card.get("max_model_len"), subject.expect.context
    if not isinstance(length, int):
        raise _Unknown("the engine does not say how long a context may be")
    if needed is not None and length < needed:
        raise _Failed(
            f"{length} tokens, {needed} are needed", f"serve with --max-model-len {needed}"
        )
    return f"{length} tokens"


def _whole_ids(subject: _Subject) -> str:
    _require_ids(subject.greedy)
    return f"{len(subject.greedy.token_ids)} ids, as many logprobs, as usage says"


def _streamed_ids(subject: _Subject) -> str:
    streamed = subject.probe.chat(stream=True)
    _require_ids(streamed)
    if (streamed.prompt_ids, streamed.token_ids) != (
        subject.greedy.prompt_ids,
        subject.greedy.token_ids,
    ):
        raise _Failed(
            "the same greedy request gave other ids streamed than whole",
            "do not record through this engine: one of the two is not what was sampled",
        )
    return "the ids of the whole reply"


def _require_ids(reply: ProbeReply) -> None:
    remedy = f"vLLM {'.'.join(map(str, OLDEST))} or newer returns them with return_token_ids"
    if not reply.prompt_ids:
        raise _Failed("no prompt_token_ids came back", remedy)
    if not reply.token_ids:
        raise _Failed("no token_ids came back", remedy)
    counts = len(reply.token_ids), len(reply.logprobs), reply.usage.get("completion_tokens")
    if len(set(counts)) > 1:
        raise _Failed(
            "{} ids, {} logprobs, usage says {}".format(*counts), "upgrade vLLM: they must agree"
        )
    if contract.MISSING_LOGPROB in reply.logprobs:
        raise _Failed("a sampled token has no logprob", "upgrade vLLM: each must have one")


def _exact_continuation(subject: _Subject) -> str:
    probe, greedy = subject.probe, subject.greedy
    sent = [*(greedy.prompt_ids or []), *greedy.token_ids]
    exact: dict[str, Any] = {"kv_transfer_params": {"prompt_token_ids": sent}}
    remedy = "upgrade vLLM, or record with continuation=rendered"
    replies = [probe.chat(**exact), probe.chat(stream=True, **exact)]
    for reply in replies:
        if reply.prompt_ids != sent:
            raise _Failed("kv_transfer_params.prompt_token_ids came back changed", remedy)
    wanted = probe.complete(sent, temperature=0.0)
    for reply in replies:
        if reply.token_ids[:1] != wanted.token_ids[:1]:
            raise _Failed("the prompt ids are echoed, but not what was continued", remedy)
    return f"{len(sent)} ids sent, echoed and continued, streamed and whole"


def _require_sampling(subject: _Subject) -> None:
    if subject.is_scripted:
        raise _Unknown("a script writes the replies, so nothing is computed or drawn")


def _logprobs_mode(subject: _Subject) -> str:
    """Check that logprobs follow the temperature, as processed ones do and raw ones do not."""
    _require_sampling(subject)
    remedy = "serve with --logprobs-mode processed_logprobs"
    plain, cool = (
        subject.probe.chat(max_tokens=1, temperature=temperature, top_logprobs=20, seed=1)
        for temperature in (1.0, 0.5)
    )
    if not (any(plain.top_logprobs) and any(cool.top_logprobs)):
        raise _Failed("no top_logprobs came back", remedy)
    before, after = sorted(plain.top_logprobs[0])[::-1], sorted(cool.top_logprobs[0])[::-1]
    if max(cool.logprobs + before) > 1e-4:
        raise _Failed("what stands for logprobs is above 0: they are logits", remedy)
    apart = before[0] - before[1]
    if before[0] > -1e-6 or apart < 1e-3:
        raise _Unknown("the policy's next tokens are alike, so raw and processed look alike")
    # Halving the temperature doubles the distance between two tokens.
    if abs((after[0] - after[1]) - 2 * apart) > 0.02 + 0.05 * apart:
        raise _Failed("logprobs do not follow the temperature: they are raw", remedy)
    return "processed: of what was drawn from, at the temperature that was asked for"


def _sampling_defaults(subject: _Subject) -> str:
    """Check that a request without sampling parameters samples from the policy itself."""
    _require_sampling(subject)
    remedy = "serve with --generation-config vllm"
    if subject.setting("model_config", "generation_config") not in (None, "vllm"):
        raise _Failed("sampling defaults come from the model's files", remedy)
    prompt = subject.random_prompt(8)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for seed in (1, 2):
        silent = subject.probe.complete(prompt, max_tokens=24, seed=seed)
        spoken = subject.probe.complete(prompt, max_tokens=24, seed=seed, **neutral)
        if silent.token_ids != spoken.token_ids:
            raise _Failed("a request without a temperature is not sampled at temperature 1", remedy)
    return "temperature 1, no top-p, no top-k"


_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Answers nothing.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
_FORCED: Final = {
    "hermes": '<tool_call>\n{"name": "probe", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=probe>\n</function>\n</tool_call>",
}
"""The text with which a model calls the tool, by tool parser, where that is known."""


def _tool_calls(subject: _Subject) -> str:
    if not subject.is_vllm:
        raise _Unknown("replies are only forced on vLLM")
    wanted = subject.parsers
    if wanted is not None and wanted.tool is None:
        return "none in this template: requests with tools are refused"
    response = subject.probe.post(
        contract.CHAT_COMPLETIONS,
        {
            "model": subject.probe.model,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [_TOOL],
            "max_tokens": 1,
        },
    )
    parser = wanted.tool if wanted else None
    remedy = (
        f"give `bridle engine vllm` --set tool_parser={parser or 'NAME'}, "
        f"or vLLM --enable-auto-tool-choice --tool-call-parser {parser or 'NAME'}"
    )
    if response.is_error:
        raise _Failed(f"requests with tools are refused: {refusal(response)}", remedy)
    if parser not in _FORCED:
        raise _Unknown(
            f"tools are accepted; no reply to force is known for {parser or 'its model'}"
        )
    for stream in (False, True):
        forced = subject.probe.chat(
            stream=stream,
            tools=[_TOOL],
            max_tokens=200,
            structured_outputs={"choice": [_FORCED[parser]]},
            kv_transfer_params={"prompt_token_ids": _answering_prompt(subject)},
        )
        _require_ids(forced)
        if forced.tool_names != ["probe"]:
            raise _Failed(f"a call written as {parser} writes it was not parsed", remedy)
    return f"{parser}: a forced call was parsed, streamed and whole"


def _answering_prompt(subject: _Subject) -> list[int]:
    """Return a prompt after which no reasoning is expected.

    Otherwise vLLM would not force the reply yet.
    """
    ids = list(subject.greedy.prompt_ids or [])
    if subject.parsers and subject.parsers.reasoning:
        ids += subject.probe.tokenize("<think>\n\n</think>\n\n")
    return ids


def _reasoning(subject: _Subject) -> str:
    if not subject.config or subject.parsers is None:
        raise _Unknown("its settings or its model's files are not to be seen here")
    found = subject.setting("structured_outputs_config", "reasoning_parser") or None
    wanted = subject.parsers.reasoning
    if found != wanted:
        raise _Failed(
            f"reasoning parser {found}, its template asks for {wanted}",
            f"serve with --set reasoning_parser={wanted}" if wanted else "serve without one",
        )
    return f"parser {found}" if found else "none in this template"


def _prefix_cache(subject: _Subject) -> str:
    _require_sampling(subject)
    length = min(1200, int(subject.card.get("max_model_len") or 1200) - 8)
    prompt = subject.random_prompt(length)
    before = _cache_hits(subject)
    subject.probe.complete(prompt, max_tokens=1)
    reused = subject.probe.complete(prompt, max_tokens=1).cached_tokens
    if reused is None:
        after = _cache_hits(subject)
        if before is None or after is None:
            raise _Unknown("the engine does not say what it reuses")
        reused = int(after - before)
    if reused <= 0:
        raise _Failed(
            f"a prompt of {length} tokens was computed twice", "serve with --enable-prefix-caching"
        )
    return f"{reused} of {length} prompt tokens reused"


def _cache_hits(subject: _Subject) -> float | None:
    response = subject.probe.get("/metrics")
    hits = [
        float(line.rpartition(" ")[2])
        for line in response.text.splitlines()
        if line.startswith("vllm:prefix_cache_hits_total")
    ]
    return sum(hits) if hits and not response.is_error else None


def _control_routes(subject: _Subject) -> str:
    response = subject.probe.get(contract.IS_PAUSED)
    if response.is_error:
        raise _Failed("weights cannot be published: there are no control routes", CONTROL_REMEDY)
    if response.json().get("is_paused"):
        raise _Failed("the engine is paused and would answer nothing", "POST /resume")
    return "pause, reload and resume are there"


def _control_closed(subject: _Subject) -> str:
    address = urlsplit(subject.probe.base_url)
    host, port = address.hostname or "", address.port or 80
    if subject.expect.private_network:
        raise _Unknown("taken to be a private network")
    elsewhere = [host] if not is_loopback(host) else _own_addresses()
    for other in elsewhere:
        if _answers(other, port):
            raise _Failed(
                f"control routes answer without a key on {other}:{port}",
                "start it with `bridle engine vllm` and VLLM_API_KEY, serve with --host 127.0.0.1, "
                "or say that the network is private",
            )
    return "on loopback, or to nobody without the key"


def _own_addresses() -> list[str]:
    """Return this machine's addresses other than loopback, as far as names or routes show them."""
    found = set()
    with contextlib.suppress(socket.gaierror):
        found |= {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    # Connecting a datagram socket sends nothing; it picks the address of the way out.
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with udp, contextlib.suppress(OSError):
        udp.connect(("192.0.2.1", 9))
        found.add(udp.getsockname()[0])
    return sorted(str(address) for address in found if not is_loopback(str(address)))


def _answers(host: str, port: int) -> bool:
    netloc = f"[{host}]" if ":" in host else host
    try:
        url = f"http://{netloc}:{port}{contract.IS_PAUSED}"
        return httpx.get(url, timeout=3.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _reloads(subject: _Subject) -> str:
    """Check for known faults of reloads.

    Scoring after each publish proves that a reload was right.
    """
    if not subject.config:
        raise _Unknown("its settings are not to be seen here; each publish is verified by scoring")
    if subject.setting("device_config", "device") != "cpu":
        return "each publish is verified by scoring"
    if subject.setting("scheduler_config", "enable_chunked_prefill"):
        raise _Failed(
            "a seeded request with a long prompt ends vLLM on CPU",
            "serve with --no-enable-chunked-prefill --max-num-batched-tokens CONTEXT",
        )
    if subject.setting("parallel_config", "worker_cls") != WORKER:
        raise _Failed(
            "vLLM on CPU reloads tied embeddings into a stale output layer",
            f"serve with --worker-cls {WORKER}, or start it with `bridle engine vllm`",
        )
    return "refused whole or done whole; tied embeddings are packed again"


def _transfers(subject: _Subject) -> str:
    if not subject.config:
        raise _Unknown("its settings are not to be seen here")
    if subject.setting("weight_transfer_config", "backend") != TRANSFER_BACKEND:
        return "not taken; weights are published through directories"
    return "taken from the trainer's memory, whole or not at all"


_CHECKS: Final[Sequence[tuple[str, Callable[[_Subject], str]]]] = (
    ("context", _context),
    ("token ids", _whole_ids),
    ("streamed token ids", _streamed_ids),
    ("exact continuation", _exact_continuation),
    ("logprobs mode", _logprobs_mode),
    ("sampling defaults", _sampling_defaults),
    ("tool calls", _tool_calls),
    ("reasoning", _reasoning),
    ("prefix cache", _prefix_cache),
    ("control routes", _control_routes),
    ("control closed", _control_closed),
    ("weight reloads", _reloads),
    ("weight transfers", _transfers),
)
