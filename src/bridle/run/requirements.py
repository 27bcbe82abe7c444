"""The requirements of a training run, which are checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.harnesses.tasks import Task
from bridle.run.agents import first_tasks
from bridle.run.config import (
    EvaluationConfig,
    RecordingsConfig,
    RunConfig,
    ServicesConfig,
    TasksConfig,
)
from bridle.run.environment import is_base_url
from bridle.store.records import DEFAULT_POLICY

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
"""The form of a policy's name, which also names a folder and is part of options of
``bridle proxy``."""


def require_training(config: RunConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` if parts of ``config`` are missing or conflict."""
    services, recordings = config.services, config.recordings
    _require_urls(services)
    if not recordings.alone:
        if recordings != RecordingsConfig() and not recordings.share:
            raise UsageError(
                "settings of recordings are for --from-store, or for recordings.share: set one"
            )
        if recordings.share:
            _require_mixture(config)
        if not (config.agent.name and config.tasks.source):
            raise UsageError("name --agent and --tasks, or --from-store")
    elif config.evaluation.every:
        raise UsageError("evaluation.every runs an agent, and --from-store has none")
    if config.policies and (services.engine_urls or recordings.alone):
        raise UsageError(
            "several policies are trained with engines that the run starts: set no policies, or "
            "leave out --engine-url and --from-store"
        )
    starts_engine = not recordings.alone and not services.engine_urls
    transfers = config.training.publish.through == "transfer"
    if starts_engine and transfers and config.policy.engine != "vllm":
        raise UsageError("weights are transferred to a vLLM only: add --engine vllm")
    if publishes_lora(config):
        _require_lora(config)
    _require_roles(config)


def publishes_lora(config: RunConfig) -> bool:
    """Return whether adapters are published alone, without the model below them."""
    return config.training.publish.through == "lora"


def _require_lora(config: RunConfig) -> None:
    if not config.training.lora.rank:
        raise UsageError("training.publish.through=lora publishes adapters: set training.lora.rank")
    starts_engine = not config.recordings.alone and not config.services.engine_urls
    if starts_engine and config.policy.engine != "vllm":
        raise UsageError("adapters are published to a vLLM only: add --engine vllm")
    if len(config.services.engine_urls) > 1:
        raise UsageError("adapters are published to one engine: give one --engine-url")


def require_one_base(first: Path, others: Mapping[str, Path]) -> None:
    """Raise :class:`bridle.errors.UsageError` unless all policies begin as the first one's model.

    Their adapters are served on one model.
    """
    for name, other in others.items():
        if other.resolve() != first.resolve():
            raise UsageError(
                f"policies.{name}.model is another model than policy.model, and adapters that are "
                "published with training.publish.through=lora share one: leave it out"
            )


def _require_mixture(config: RunConfig) -> None:
    if config.policies:
        raise UsageError("recordings.share is for one policy: set no policies, or a share of 0")
    if config.training.loss.importance == "none":
        raise UsageError(
            "recordings.share needs importance weights: set training.loss.importance, such as to "
            "truncate"
        )
    alone = [name for name in ("version", "wait_for", "other_policy") if _is_set(config, name)]
    if alone:
        raise UsageError(
            f"recordings.{alone[0]} is for --from-store without recordings.share: leave one out"
        )


def _is_set(config: RunConfig, name: str) -> bool:
    return bool(getattr(config.recordings, name) != getattr(RecordingsConfig(), name))


def _require_urls(services: ServicesConfig) -> None:
    named = [("engine", url) for url in services.engine_urls]
    if services.proxy_url is not None:
        named.append(("proxy", services.proxy_url))
    for name, url in named:
        if not is_base_url(url):
            raise UsageError(f"--{name}-url {url!r} is not a URL such as http://127.0.0.1:8000")


def _require_roles(config: RunConfig) -> None:
    for name, one in config.policies.items():
        if not _NAME.fullmatch(name) or name == DEFAULT_POLICY:
            raise UsageError(
                f"a policy of policies.{name} needs another name: of letters, digits, - and _, and "
                f"not {DEFAULT_POLICY!r}, which is the first one's"
            )
        for role in one.roles or (name,):
            if config.policy_roles[role] != name:
                raise UsageError(
                    f"role {role} has two policies, {name} and {config.policy_roles[role]}"
                )


def require_same_tokenizer(name: str, first: Tokenizer, other: Tokenizer) -> None:
    """Raise :class:`bridle.errors.UsageError` unless two policies share tokenizer and template.

    The policy ``name`` must have the first one's tokenizer and chat template, which render and
    tokenize the prompts of both.
    """
    same = first.backend.to_str() == other.backend.to_str()
    if same and first.chat_template_source == other.chat_template_source:
        return
    raise UsageError(
        f"policies.{name}.model has another tokenizer or chat template than policy.model: begin "
        "both with one model"
    )


def held_out_tasks(wanted: EvaluationConfig, trained: TasksConfig) -> list[Task]:
    """Return the tasks on which the policy is measured, none without ``evaluation.every``.

    Raise :class:`bridle.errors.UsageError` if they would be those on which it is trained.
    """
    if not wanted.every:
        return []
    source = wanted.source or trained.source
    if (source, wanted.split) == (trained.source, trained.split):
        raise UsageError(
            "the held-out tasks are those that are trained on: name evaluation.split or "
            "evaluation.source"
        )
    return first_tasks(source, wanted.split, wanted.limit)
