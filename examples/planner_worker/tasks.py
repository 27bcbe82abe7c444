"""Notes for the planner and the worker, made by rule, in two splits that share no job of a person.

    python tasks.py > first.jsonl

writes conversations of both roles as they should go, to begin with where a model knows neither.

A note has three sentences in any order: two people who work and one who only lives somewhere. The
split of ``Eva works as a tailor.`` is decided by a hash of it, so that it is the same whatever the
seed.
"""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator

from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery

SUITE = "planner-worker"
HELD_OUT_PERCENT = 20
NAMES = ("Ada", "Ben", "Eva", "Ida", "Jan", "Leo", "Mia", "Nora", "Otto", "Paul", "Rosa", "Tom")
JOBS = ("baker", "cook", "doctor", "farmer", "judge", "lawyer", "nurse", "pilot", "tailor")
CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Tokyo", "Berlin")


def verifier(delivery: Delivery) -> dict[str, float]:
    """A reward for each role; a session's is their sum, 2 at best.

    ``planner``: the share of the names that are right, or of those that should be there, if fewer
    are. ``worker``: over the right names, the right job's share of its words, since one was asked
    for; 0 without a right name.
    """
    wanted: dict[str, str] = delivery.task.payload["jobs"]
    places = [place.partition(":") for place in delivery.answer.split("|") if place.strip()]
    found = {name.strip(): re.findall(r"\w+", job.casefold()) for name, _, job in places}
    scores = [_score(found[name], job) for name, job in wanted.items() if name in found]
    return {
        "planner": len(scores) / max(len(places), len(wanted)),
        "worker": sum(scores) / len(scores) if scores else 0.0,
    }


def _score(words: list[str], job: str) -> float:
    return 1 / len(words) if set(words) & set(JOBS) == {job} else 0.0


def works(name: str, job: str) -> str:
    return f"{name} works as a {job}."


def is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % 100 < HELD_OUT_PERCENT


def tasks(split: str, count: int | None = None, seed: int = 0) -> list[Task]:
    """``count`` distinct tasks of ``split`` (``train``, ``held_out``), ordered by ``seed``."""
    draw = random.Random(seed)
    workers = [
        worker
        for worker in itertools.product(NAMES, JOBS)
        if is_held_out(works(*worker)) == (split == "held_out")
    ]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(workers, 2)
        if one[0] != other[0] and one[1] != other[1]
    ]
    draw.shuffle(pairs)
    return [_task(split, dict(pair), draw) for pair in pairs[:count]]


def _task(split: str, jobs: dict[str, str], draw: random.Random) -> Task:
    resident = draw.choice([name for name in NAMES if name not in jobs])
    sentences = [works(name, job) for name, job in jobs.items()]
    sentences.append(f"{resident} lives in {draw.choice(CITIES)}.")
    draw.shuffle(sentences)
    return Task(
        id="-".join(itertools.chain(*jobs.items())).lower(),
        suite=SUITE,
        split=split,
        prompt=" ".join(sentences),
        payload={"jobs": jobs},
    )


def train() -> list[Task]:
    return tasks("train")


def held_out() -> list[Task]:
    return tasks("held_out")


def conversations(count: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield the conversations of ``count`` sessions in which neither role errs.

    Each one is a line of ``bridle sft --data``.
    """
    from agent import PLAN_EXAMPLE, WORK_EXAMPLE, ask_for_job, ask_for_names

    for task in tasks("train", count):
        jobs = task.payload["jobs"]
        plan = [PLAN_EXAMPLE, (ask_for_names(task.prompt), ", ".join(jobs))]
        work = [WORK_EXAMPLE, *((ask_for_job(task.prompt, name), jobs[name]) for name in jobs)]
        for turns in (plan, work):
            yield {
                "messages": [
                    {"role": role, "content": text}
                    for turn in turns
                    for role, text in zip(("user", "assistant"), turn, strict=True)
                ]
            }


if __name__ == "__main__":
    for conversation in conversations(count=200):
        print(json.dumps(conversation))
