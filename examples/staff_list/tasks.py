"""Notes for the staff list, made by rule, in two splits that share no sentence.

A task is two sentences, each with a name, a city, the job of somebody else and the job in question.
A sentence's split is decided by a hash of its text, so that it is in the same split whatever the
seed.
"""

import hashlib
import itertools
import json
import random
import re
from pathlib import Path

from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery

SUITE = "staff"
HELD_OUT_PERCENT = 20
STAFF: dict[str, list[str]] = json.loads(Path(__file__).with_name("staff.json").read_text())


def verifier(delivery: Delivery) -> float:
    """The mean score of the list's places.

    The agent asks for one word. So a place scores the right job's share of its words: 1 for the
    job alone, 0.2 for a sentence of five words that names it, 0 where another job is named or none.
    """
    wanted: list[str] = delivery.task.payload["jobs"]
    given = [re.findall(r"\w+", place.casefold()) for place in delivery.answer.split("|")]
    if len(given) != len(wanted):
        return 0.0
    return sum(map(_score, given, wanted)) / len(wanted)


def _score(words: list[str], job: str) -> float:
    named = set(words) & set(STAFF["jobs"])
    return 1 / len(words) if named == {job} else 0.0


def sentence(name: str, city: str, other: str, job: str) -> str:
    return f"{name} lives in {city} with a {other} and works as a {job}."


def is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % 100 < HELD_OUT_PERCENT


def tasks(split: str, count: int | None = None, seed: int = 0) -> list[Task]:
    """``count`` distinct tasks of ``split`` (``train``, ``held_out``), ordered by ``seed``."""
    every = (STAFF["names"], STAFF["cities"], STAFF["jobs"], STAFF["jobs"])
    people = [
        (name, city, other, job)
        for name, city, other, job in itertools.product(*every)
        if other != job and is_held_out(sentence(name, city, other, job)) == (split == "held_out")
    ]
    random.Random(seed).shuffle(people)
    pairs = list(zip(people[::2], people[1::2], strict=False))[:count]
    return [
        Task(
            id="-".join(itertools.chain(*pair)).lower(),
            suite=SUITE,
            split=split,
            prompt=" ".join(sentence(*person) for person in pair),
            payload={
                "jobs": [job for *_, job in pair],
                "hint": f"The answers are: {', then '.join(job for *_, job in pair)}.",
            },
        )
        for pair in pairs
    ]


def train() -> list[Task]:
    return tasks("train")


def held_out() -> list[Task]:
    return tasks("held_out")
