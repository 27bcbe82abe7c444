"""A script that lists the tasks of a verifiers environment, or plays one of them in a session.

It is run by the Python that has the environment installed, which need not have Bridle::

    player.py tasks NAME             a line of JSON for each task: its id and its prompt
    player.py play NAME INDEX FILE   plays a task at OPENAI_BASE_URL; its rewards, as JSON, in FILE

NAME is an environment's, or a TOML file with the ``[env]`` block of a verifiers run. Source:
verifiers 0.4, ``verifiers.v1``: ``Env.run_episode`` and its ``EvalClient``, which relays the
requests of any harness as they are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from verifiers.v1 import Env, EvalClientConfig, ModelContext, SubprocessConfig, Task
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def environment(name: str) -> Env[Any]:
    """Load the environment.

    Its agents run as processes here unless its file names another runtime.
    """
    block: dict[str, Any] = {"taskset": {"id": name}}
    if name.endswith(".toml"):
        block = tomllib.loads(Path(name).read_text(encoding="utf-8"))["env"]
    config = resolve_env_config(block)
    agents = agent_config_fields(config)
    if len(agents) != 1:
        sys.exit(f"{name} is played by {len(agents)} agents; a session has one: name another")
    for role, agent in agents.items():
        if "runtime" not in block.get(role, {}):
            config = config.model_copy(
                update={role: agent.model_copy(update={"runtime": SubprocessConfig()})}
            )
    return load_environment(config)


def show_tasks(name: str) -> None:
    for index, task in enumerate(environment(name).taskset):
        data = task.data
        line = {"id": data.id or data.name or str(index), "prompt": data.prompt_text}
        print(json.dumps(line), flush=True)


async def play(name: str, index: int) -> dict[str, Any]:
    """Play the task at ``index`` and return its rewards and errors.

    ``reward`` is the weighted sum of the rewards, as in verifiers.
    """
    env = environment(name)
    task: Task[Any, Any, Any] = next(itertools.islice(env.taskset, index, None))
    url = os.environ["OPENAI_BASE_URL"]
    client = EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, ModelContext(os.environ["OPENAI_MODEL"], client))
    found: dict[str, Any] = {
        "errors": [f"{error.type}: {error.message}" for error in episode.errors]
    }
    for trace in episode.traces:
        found["errors"] += [f"{error.type}: {error.message}" for error in trace.errors]
        if None not in trace.rewards.values():
            scores = {key: reward.score for key, reward in trace.rewards.items()}
            metrics = {key: value for key, value in trace.metrics.items() if value is not None}
            found["rewards"] = {**metrics, **scores, "reward": trace.reward}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "tasks":
        show_tasks(sys.argv[2])
    else:
        played = asyncio.run(play(sys.argv[2], int(sys.argv[3])))
        Path(sys.argv[4]).write_text(json.dumps(played), encoding="utf-8")
        print(*played["errors"], sep="\n", file=sys.stderr)
