"""``bridle bench vllm``: tokens per second of vLLM through the recording proxy, against direct.

Within each round the same streamed load is put on vLLM directly and through the proxy, in turns,
because machines drift. A direct request is that of a client that does not record: it asks for no
token ids and no logprobs. The cost of asking for those is measured separately as
``direct_with_ids``. Replies have a fixed length, so that the number of tokens is that of calls
times the length; the store must hold all of them afterwards.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.bench.load import SESSION_CALLS, Load, Measured
from bridle.bench.proxy import cpu_seconds
from bridle.run.environment import EngineKind
from bridle.run.services import Service
from bridle.run.stack import MODEL, VLLM_START_S, engine_service
from bridle.store.reading.queries import Reader

DIRECT: Final = "direct"
WITH_IDS: Final = "direct_with_ids"
PROXIED: Final = "proxied"
_IDS: Final = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
_REQUEST_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a measurement."""

    concurrency: int = 16
    """Number of concurrent sessions."""
    rounds: int = 3
    calls: int = 2
    """Number of calls per session and round."""
    tokens: int = 128
    """The length of each reply, in tokens."""
    publishes: int = 0
    """Number of publishes by directory, and as many by transfer, after the rounds; for vLLM
    only."""

    def __post_init__(self) -> None:
        if self.calls > SESSION_CALLS:
            raise ValueError(f"a session has at most {SESSION_CALLS} calls")


def measure(
    plan: Plan,
    policy: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    engine_kind: EngineKind = "vllm",
) -> dict[str, Any]:
    """Return the report.

    ``policy`` is a model directory; by default one of 20 million weights is made.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        policy = policy or make_bench_policy(folder / "policy")
        progress("vLLM starts")
        engine = stack.enter_context(engine_service(engine_kind, policy, folder))
        store = folder / "bench.db"
        proxy = stack.enter_context(_proxy(engine.url, policy, store, folder))
        urls = {
            DIRECT: f"{engine.url}/v1",
            WITH_IDS: f"{engine.url}/v1",
            PROXIED: f"{proxy.url}/s/{{session}}/v1",
        }
        for target, url in urls.items():
            progress(f"warming up: {target}")
            _asked(dataclasses.replace(plan, calls=1), target, url, "warm")
        speeds: dict[str, list[float]] = {target: [] for target in urls}
        failed, used = 0, 0.0
        for number in range(plan.rounds):
            # Each round begins with another target, so that none is always the first.
            names = list(urls)
            for target in names[number % len(names) :] + names[: number % len(names)]:
                progress(f"round {number + 1} of {plan.rounds}: {target}")
                before = cpu_seconds(proxy.pid)
                measured = _asked(plan, target, urls[target], f"round{number}")
                used += cpu_seconds(proxy.pid) - before if target == PROXIED else 0.0
                failed += measured.failed
                speeds[target].append(measured.calls * plan.tokens / measured.seconds)
        report = _report(plan, speeds, failed, used, store)
        if plan.publishes:
            from bridle.bench.publishing import measure_publishing

            progress("publishing")
            report["publish"] = measure_publishing(engine.url, policy, folder, plan.publishes)
        return report


def _proxy(engine_url: str, policy: Path, store: Path, folder: Path) -> Service:
    arguments = ["proxy", "--upstream", engine_url, "--tokenizer", str(policy)]
    arguments += ["--store", str(store), "--port", "0"]
    return Service(arguments, folder / "proxy.log", start_timeout_s=VLLM_START_S)


def _asked(plan: Plan, target: str, url: str, name: str) -> Measured:
    fields: dict[str, Any] = {"max_tokens": plan.tokens, "ignore_eos": True}
    if target == WITH_IDS:
        fields |= _IDS
    load = Load(
        url=url,
        model=MODEL,
        concurrency=plan.concurrency,
        request_bytes=_REQUEST_BYTES,
        # Prompts of its own: the second to ask the same would find it in the prefix cache.
        name=f"bench-{name}-{target}",
        calls=plan.calls,
        stream=True,
        fields=fields,
    )
    done = subprocess.run(
        [sys.executable, "-m", "bridle.bench.load"],
        input=orjson.dumps(dataclasses.asdict(load)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return Measured(**orjson.loads(done.stdout))


def _report(
    plan: Plan, speeds: Mapping[str, list[float]], failed: int, used: float, store: Path
) -> dict[str, Any]:
    medians = {target: statistics.median(values) for target, values in speeds.items()}
    asked = plan.concurrency * (1 + plan.rounds * plan.calls) * plan.tokens
    with Reader(str(store)) as reader:
        held = sum(
            call.sampled_tokens or 0
            for session in reader.sessions()
            for call in reader.calls(session.id)
        )
    return {
        "concurrent_sessions": plan.concurrency,
        "tokens_per_s": {target: round(value, 1) for target, value in medians.items()},
        "tokens_per_s_by_round": {
            target: [round(value, 1) for value in values] for target, values in speeds.items()
        },
        "ratio": round(_ratio(speeds, DIRECT), 4),
        "ratio_to_direct_with_ids": round(_ratio(speeds, WITH_IDS), 4),
        "proxy_cpu_us_per_token": round(
            1e6 * used / (plan.concurrency * plan.rounds * plan.calls * plan.tokens), 1
        ),
        "failed": failed,
        "tokens_lost": asked - held,
    }


def _ratio(speeds: Mapping[str, list[float]], other: str) -> float:
    """Return the median over the rounds of the ratio of two speeds.

    It is the proxied speed, divided by the other target's in the same round.
    """
    pairs = zip(speeds[PROXIED], speeds[other], strict=True)
    return statistics.median(own / bare for own, bare in pairs)


def make_bench_policy(directory: Path) -> Path:
    """Make a policy with random weights, large enough to keep a core busy as an engine should."""
    from bridle.recipes.models.tiny import TinyShape, make_policy
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    filler = "The quick brown fox jumps over the lazy dog. Session question 0123456789?"
    size = train_tokenizer(directory, [filler] * 8, vocab_size=512)
    shape = TinyShape(hidden=512, layers=6, heads=8, kv_heads=4, intermediate=1536, context=2048)
    make_policy(directory, shape, vocab_size=size, seed=0)
    return directory
