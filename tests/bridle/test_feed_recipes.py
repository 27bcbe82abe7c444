"""The recipes of docs/data.md, as they are written there, against a running proxy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.reconstruct import open_store

pytestmark = pytest.mark.usefixtures("warm_start")

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def recipe(heading: str) -> list[str]:
    part = PAGE.read_text().split(f"### {heading}\n")[1].split("\n### ")[0]
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)


def key_of_the_page() -> str:
    """The admin key, read as the page reads it."""
    names: dict[str, Any] = {}
    part = PAGE.read_text().split("## The feed\n")[1].split("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    exec(block, names)  # noqa: S102 - the page's own code
    return str(names["key"])


@pytest.fixture
def proxy(model_dir: Path, store: str) -> Iterator[str]:
    """A proxy with two sealed sessions, one of them good.

    It is started as the README starts it, so that it makes an admin key of its own.
    """
    torch.set_num_threads(1)
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("It is 5."), served_model_name="m"
    ) as engine:
        command = [sys.executable, "-m", "bridle", "proxy", "--engine", engine.base_url]
        command += ["--store", store, "--tokenizer", str(model_dir), "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                url = json.loads(running.stdout.readline())["url"]
                record(url)
                yield url
            finally:
                running.terminate()


def record(url: str) -> None:
    """Two sessions with a reward; returns when the feed has them."""
    admin = {"authorization": f"Bearer {key_of_the_page()}"}
    with httpx.Client(base_url=url, headers=admin, timeout=60, trust_env=False) as api:
        for value in (1.0, 0.0):
            new = api.post("/bridle/v1/sessions", json={"group_id": "g"}).json()
            key = {"authorization": f"Bearer {new['key']}"}
            ask = {"model": "m", "messages": [{"role": "user", "content": "2 plus 3?"}]}
            assert api.post("/v1/chat/completions", json=ask, headers=key).status_code == 200
            at = f"/bridle/v1/sessions/{new['id']}"
            api.post(f"{at}/rewards", json={"name": "reward", "value": value}).raise_for_status()
            api.post(f"{at}/seal", json={}).raise_for_status()
        end = time.monotonic() + 60
        while len(api.get("/bridle/v1/trajectories").text.splitlines()) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_recipe_without_the_key_fails_in_words(proxy: str) -> None:
    for name in ("TRL", "verl"):
        (block,) = recipe(name)
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            exec(block, {"proxy": proxy, "key": "none"})  # noqa: S102 - the page's own code


def test_trl_trains_a_step_on_what_it_leases(
    proxy: str, store: str, model_dir: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(model_dir, policy)
    make_policy(policy, TinyShape(), vocab_size=600)
    names: dict[str, Any] = {
        "proxy": proxy,
        "key": key_of_the_page(),
        "policy": str(policy),
        "output": str(tmp_path / "out"),
    }
    (block,) = recipe("TRL")
    exec(block, names)  # noqa: S102 - the page's own code
    assert 0 < names["loss"] < 100
    with open_store(store) as recorded:
        (sample,) = next(recorded.sessions()).samples()
    (row,) = names["batch"].to_list()
    assert row["input_ids"] == sample.token_ids.tolist()
    assert [label != -100 for label in row["labels"]] == sample.mask.tolist()
    assert names["feed"].post("/lease").status_code == 204, "they are acknowledged"
    with pytest.raises(SystemExit, match="no session is sealed and rewarded yet"):
        exec(block, names)  # noqa: S102


def test_verl_gets_its_tensors(proxy: str, store: str) -> None:
    names: dict[str, Any] = {"proxy": proxy, "key": key_of_the_page()}
    (block,) = recipe("verl")
    exec(block, names)  # noqa: S102 - the page's own code
    tensors, extra = names["tensors"], names["extra"]
    assert extra == {"uid": ["g", "g"], "score": [1.0, 0.0]}
    with open_store(store) as recorded:
        (sample,) = next(recorded.sessions()).samples()
    whole = torch.cat([tensors["prompts"][0], tensors["responses"][0]]).tolist()
    assert whole == sample.token_ids.tolist()
    learned = sample.mask[tensors["prompts"].shape[1] :]
    assert tensors["response_mask"][0].bool().tolist() == learned.tolist()
    scored = sample.logprobs[sample.mask]
    assert tensors["rollout_log_probs"][0].numpy().tobytes() == scored.tobytes()


async def test_a_trainer_of_ones_own_gets_each_session_once(proxy: str, store: str) -> None:
    names: dict[str, Any] = {}
    (block,) = recipe("Your own trainer")
    exec(block, names)  # noqa: S102 - the page's own code
    trained: list[Any] = []
    given = proxy, key_of_the_page(), lambda *session: trained.append(session)
    assert [await names["train_once"](*given) for _ in range(2)] == [2, 0]
    with open_store(store) as recorded:
        (sample,) = next(recorded.sessions()).samples()
    (first, rewards), _ = trained
    assert (first[0]["token_ids"], rewards) == (sample.token_ids.tolist(), {"reward": 1.0})


def test_verl_compares_what_the_trainer_compares(proxy: str) -> None:
    """Two suites may count their tasks from one, and a session may have neither task nor group."""
    names: dict[str, Any] = {"proxy": proxy, "key": key_of_the_page()}
    (block,) = recipe("verl")
    exec(block, names)  # noqa: S102 - the page's own code
    sample = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -0.5]}
    rewarded = {"reward": 1.0}
    task = {"task_suite": None, "task_split": None, "task_id": None}
    lines = [
        json.dumps(
            {
                "session_id": name,
                "group_id": None,
                "rewards": rewarded,
                "samples": [sample],
                **told,
            }
        )
        for name, told in (
            ("a", {"task_suite": "shop", "task_split": "train", "task_id": "1"}),
            ("b", {"task_suite": "shop", "task_split": "train", "task_id": "1"}),
            ("c", {"task_suite": "lamp", "task_split": "train", "task_id": "1"}),
            ("d", task),
            ("e", task),
        )
    ]
    unscored = {**json.loads(lines[0]), "session_id": "f", "rewards": {}}
    _, extra = names["verl_batch"]([*lines, json.dumps(unscored)])
    assert extra["score"] == [1.0] * 5, "no missing reward is 0"
    with pytest.raises(SystemExit, match="no sample has a trained token and the reward"):
        names["verl_batch"]([json.dumps(unscored)])
    first, second, *others = extra["uid"]
    assert first == second
    assert len({first, *others}) == 4
    assert all(isinstance(uid, str) for uid in extra["uid"])
