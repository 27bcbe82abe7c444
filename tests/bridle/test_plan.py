"""``bridle plan``: sizes are those of real models, and predictions are what a run then measures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.recipes.models.tiny import TinyShape, make_hybrid_policy, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.plan.cost import NotMeasured, recording_cost
from bridle.run.plan.device import Device
from bridle.run.plan.estimate import Trainers, engines, trainers
from bridle.run.plan.model import model_size
from bridle.run.plan.workload import RecordedRun, Workload, recorded_run
from bridle.run.stack import Stack, stack
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

Bridle = Callable[..., Result]

TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times."
SHAPE = TinyShape(hidden=256, layers=6, heads=4, kv_heads=2, intermediate=768, context=8192)
WORKLOAD = Workload(sessions_per_hour=1000, turns=8, prompt=2000, added=300, sampled=200)
WISH = ("--sessions-per-hour", "1000", "--set", "turns=4", "--set", "prompt=200")
WISH += ("--set", "added=50", "--set", "sampled=30")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    size = train_tokenizer(directory, [TEXT] * 4, vocab_size=400)
    make_policy(directory, SHAPE, vocab_size=size, seed=5)
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_sizes_are_those_of_the_model_that_is_loaded(tmp_path: Path, tied: bool) -> None:
    size = train_tokenizer(tmp_path, [TEXT] * 4, vocab_size=400)
    make_policy(tmp_path, replace(SHAPE, tied=tied), vocab_size=size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    found = model_size(tmp_path)

    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert found.weight_bytes == 4 * found.parameters
    table = model.get_input_embeddings().weight.numel()
    assert found.multiplied == found.parameters - (0 if tied else table)
    cache = model(torch.ones(1, 7, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert found.cache_elements * 7 == held
    assert found.cache_bytes == 4 * found.cache_elements


def test_a_layer_without_attention_keeps_no_cache_of_tokens(tmp_path: Path) -> None:
    size = train_tokenizer(tmp_path, [TEXT] * 4, vocab_size=400)
    make_hybrid_policy(tmp_path, replace(SHAPE, layers=8), vocab_size=size)
    heads, dim = SHAPE.kv_heads, SHAPE.hidden // SHAPE.heads
    assert model_size(tmp_path).cache_elements == 2 * 2 * heads * dim, "two layers of eight"


def written(directory: Path, **config: object) -> Path:
    base = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(base | config))
    return directory


def test_of_experts_those_count_that_a_token_is_sent_to(tmp_path: Path) -> None:
    shapes = {"model.layers.0.mlp.experts.0.up_proj.weight": 600, "model.norm.weight": 100}
    shapes["model.layers.0.mlp.experts.1.up_proj.weight"] = 200
    weights = {name: np.zeros(count, np.float16) for name, count in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")

    found = model_size(written(tmp_path, num_experts=8, num_experts_per_tok=2))

    assert (found.parameters, found.multiplied, found.weight_bytes) == (900, 300, 1800)


def test_a_model_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        model_size(tmp_path)
    written(tmp_path)
    with pytest.raises(UsageError, match="no weights in safetensors"):
        model_size(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(UsageError, match="is no safetensors file"):
        model_size(tmp_path)
    with pytest.raises(UsageError, match="MLA"):
        model_size(written(tmp_path, kv_lora_rank=512))


def test_what_does_not_fit_one_device_is_spread_and_what_fits_runs_at_once(policy: Path) -> None:
    size = model_size(policy)
    cache = WORKLOAD.tokens * size.cache_bytes
    roomy = Device("roomy", 1e12, 1e12, 1e11)
    assert engines(WORKLOAD, size, roomy, 32).parallel == 32
    narrow = replace(roomy, memory=(size.weight_bytes + 3.5 * cache) / 0.9)
    found = engines(WORKLOAD, size, narrow, 32)
    assert (found.devices_per_engine, found.parallel) == (1, 3)
    assert found.seconds_per_session > engines(WORKLOAD, size, roomy, 32).seconds_per_session
    small = replace(roomy, memory=size.weight_bytes / 2)
    assert engines(WORKLOAD, size, small, 32).devices_per_engine >= 3
    with pytest.raises(UsageError, match="at least one session"):
        engines(WORKLOAD, size, roomy, 0.5)


def test_twice_the_sessions_take_twice_the_devices_and_lora_less_of_them(policy: Path) -> None:
    size, device = model_size(policy), Device("slow", 1e12, 1e9, 1e9)
    common = replace(WORKLOAD, shared=1500)
    saved = engines(common, size, device, 16).seconds_per_session
    assert saved < engines(WORKLOAD, size, device, 16).seconds_per_session
    double = replace(WORKLOAD, sessions_per_hour=2 * WORKLOAD.sessions_per_hour)
    serving = engines(WORKLOAD, size, device, 16)
    assert serving.needed(double, 0.5) == pytest.approx(2 * serving.needed(WORKLOAD, 0.5), abs=1)
    assert serving.needed(WORKLOAD, 0.25) == pytest.approx(2 * serving.needed(WORKLOAD, 0.5), abs=1)
    full, lora = (trainers(WORKLOAD, size, device, lora=lora) for lora in (False, True))
    assert full.state_bytes == 16 * size.parameters
    assert lora.state_bytes < full.state_bytes
    assert lora.needed(WORKLOAD, 0.5) < full.needed(WORKLOAD, 0.5)


def test_a_reference_takes_memory_but_below_adapters_and_a_forward_pass_in_any_case(
    policy: Path,
) -> None:
    size, device = model_size(policy), Device("slow", 1e12, 1e9, 1e9)

    def planned(lora: bool, reference: bool) -> Trainers:
        return trainers(WORKLOAD, size, device, lora=lora, reference=reference)

    assert planned(False, True).state_bytes == 20 * size.parameters
    assert planned(True, True).state_bytes == planned(True, False).state_bytes
    forward = planned(False, False).seconds_per_session / 3
    for lora in (False, True):
        more = planned(lora, True).seconds_per_session - planned(lora, False).seconds_per_session
        assert more == pytest.approx(forward)


@pytest.mark.parametrize("lora", [False, True])
def test_a_training_pass_computes_what_torch_counts(policy: Path, lora: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, attn_implementation="eager"
    )
    if lora:
        for weight in model.parameters():
            weight.requires_grad_(False)
        model.enable_input_require_grads()
    tokens = 96
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, tokens, dtype=torch.long)).logits.sum().backward()

    session = Workload(1, turns=1, prompt=tokens - 1, added=0, sampled=1)
    predicted = trainers(session, model_size(policy), Device("unit", 1e12, 1.0, 1.0), lora=lora)

    # Eager attention computes what the causal mask throws away.
    assert predicted.seconds_per_session == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_command_without_a_shape_or_with_an_unknown_device_is_told_so(
    bridle: Bridle, policy: Path, store: str
) -> None:
    refused = bridle("plan", "--model", policy, "--set", "turns=3")
    assert refused.exit_code != 0
    assert "sessions_per_hour is not set; name a recorded RUN" in refused.stderr
    refused = bridle("plan", "--model", policy, *WISH, "--set", "turns=0.5")
    assert refused.exit_code == 2
    assert "turns: Expected `float` >= 1" in refused.stderr
    refused = bridle("plan", "--model", policy, *WISH, "--device", "h1000")
    assert refused.exit_code != 0
    assert "is none of this, a100" in refused.stderr
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run_empty", "rollout", 1.0))
    refused = bridle("plan", "run_empty", "--model", policy, "--store", store)
    assert "no ended session with a complete call" in refused.stderr


def test_a_call_that_is_refused_is_no_measurement(policy: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "refusing"
    shutil.copytree(policy, refusing)
    (refusing / "chat_template.jinja").write_text("{{ raise_exception('no conversation') }}")
    small = Workload(1, turns=1, prompt=20, added=1, sampled=5)
    with pytest.raises(NotMeasured, match="did not answer a call: Client error '400"):
        recording_cost(small, refusing)


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_a_plan_names_what_a_wished_workload_needs(bridle: Bridle, policy: Path) -> None:
    plan = bridle("plan", "--model", policy, *WISH, "--device", "h100")
    assert plan.exit_code == 0, plan.output
    for words in ("1.11 calls/s", "engines    1 of 1", "trainers   1 ", "SQLite", "h100: 80 GB"):
        assert words in plan.output
    wish = [*WISH]
    wish[1] = "10000000"
    found = json.loads(bridle("plan", "--model", policy, *wish, "--json").stdout)
    assert found["proxy_processes"] > 1
    assert found["store"]["name"] == "PostgreSQL"
    assert found["store"]["connections"] == 2 * found["proxy_processes"]
    assert 0 < found["store"]["idle_transactions_per_s"] < found["proxy_processes"]
    assert found["disk_bytes_per_day"] == pytest.approx(
        24 * 1e7 * found["recording"]["bytes_per_session"]
    )
    assert found["device"]["flops"] > 1e9
    assert found["device"]["bandwidth"] > 1e8


@dataclass(frozen=True)
class Played:
    """A run as its client saw it."""

    run: str
    turns: int
    prompt: float
    sampled: float
    tokens: float


def play(running: Stack, run: str, *, sessions: int, turns: int, words: int, reply: int) -> Played:
    """Whole sessions, some at a time, without streaming."""
    headers = {"authorization": f"Bearer {running.admin_key}"}

    def session(number: int) -> list[dict[str, int]]:
        with httpx.Client(base_url=running.proxy_url, timeout=120, trust_env=False) as client:
            asked = client.post("/bridle/v1/sessions", json={"run_id": run}, headers=headers)
            opened = asked.raise_for_status().json()
            own = {"authorization": f"Bearer {opened['key']}"}
            messages = [
                {"role": "system", "content": TEXT},
                {"role": "user", "content": f"{number} " + "fox jumps " * words},
            ]
            usage = []
            for _ in range(turns):
                body = {"model": "policy", "messages": messages, "max_tokens": reply}
                sent = client.post("/v1/chat/completions", json=body, headers=own)
                answer = sent.raise_for_status().json()
                usage.append(answer["usage"])
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": "lazy dog " * (words // 4)})
            sealed = client.post(f"/bridle/v1/sessions/{opened['id']}/seal", headers=headers)
            sealed.raise_for_status()
        return usage

    with ThreadPoolExecutor(4) as pool:
        used = list(pool.map(session, range(sessions)))
    return Played(
        run,
        turns,
        sum(calls[0]["prompt_tokens"] for calls in used) / sessions,
        sum(call["completion_tokens"] for calls in used for call in calls) / (sessions * turns),
        sum(calls[-1]["prompt_tokens"] + calls[-1]["completion_tokens"] for calls in used)
        / sessions,
    )


@contextmanager
def stored(tmp_path: Path, policy: Path) -> Iterator[tuple[str, Stack]]:
    store = str(tmp_path / "run.db")
    migrate(store)
    with Writer(store) as writer:
        for run in ("warm", "first", "second"):
            writer.add_sync(RunRecord(run, "rollout", 1.0))
    with stack(policy, store, tmp_path / "logs") as running:
        yield store, running


@pytest.mark.loop
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_plan_made_from_one_run_predicts_another(
    bridle: Bridle, policy: Path, tmp_path: Path
) -> None:
    with stored(tmp_path, policy) as (store, running):
        play(running, "warm", sessions=4, turns=1, words=20, reply=4)
        first = play(running, "first", sessions=12, turns=2, words=60, reply=24)
        second = play(running, "second", sessions=12, turns=6, words=160, reply=48)
    with Reader(store) as reader:
        runs: dict[str, RecordedRun] = {
            played.run: recorded_run(reader, played.run) for played in (first, second)
        }
    for played in (first, second):
        work = runs[played.run].workload
        assert (work.turns, work.sampled) == (played.turns, pytest.approx(played.sampled))
        assert work.prompt == pytest.approx(played.prompt)
        assert work.tokens == pytest.approx(played.tokens, rel=0.02)
        assert 1 <= runs[played.run].parallel <= 4
        # Of twelve sessions, eleven begin as another one does.
        system = len(Tokenizer(policy).encode(TEXT))
        assert system * 11 / 12 < work.shared < system + 20

    wanted = runs["second"].workload
    shape = {
        "turns": wanted.turns,
        "prompt": wanted.prompt,
        "added": wanted.added,
        "sampled": wanted.sampled,
    }
    words = [word for name, value in shape.items() for word in ("--set", f"{name}={value}")]
    plan = bridle("plan", "first", "--model", policy, "--store", store, *words, "--json")
    assert plan.exit_code == 0, plan.output
    found = json.loads(plan.stdout)
    reached = found["run"]["engine_efficiency"]
    assert 0 < reached <= 1
    predicted = found["engines"]["seconds_per_session"] / reached
    print(
        f"reached {reached:.3f}; predicted {predicted:.3f} s of the engine a session, "
        f"taken {runs['second'].engine_seconds:.3f} s"
    )
    assert 0.5 < predicted / runs["second"].engine_seconds < 2


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_a_recorded_session_takes_the_disk_that_was_predicted(policy: Path, tmp_path: Path) -> None:
    with stored(tmp_path, policy) as (store, running):
        empty = Path(store).stat().st_size
        play(running, "first", sessions=24, turns=6, words=160, reply=48)
    taken = (Path(store).stat().st_size - empty) / 24
    with Reader(store) as reader:
        work = recorded_run(reader, "first").workload
    predicted = recording_cost(work, policy).bytes_per_session
    print(f"predicted {predicted:.0f} bytes a session, taken {taken:.0f}")
    assert predicted == pytest.approx(taken, rel=0.35)
