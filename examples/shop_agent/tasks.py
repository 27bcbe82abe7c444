"""Questions for the shop agent, made by rule, in two splits that share no question.

A question is a form, an item and a number. Its split is decided by a hash of its text, so that a
question is in the same split whatever else is generated and whatever the seed.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import NumberAnswer

SUITE = "shop"
SHOP: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("shop.json").read_text())
HELD_OUT_PERCENT = 20

verifier = NumberAnswer()


@dataclass(frozen=True)
class Form:
    """A way to ask: the field to look up, the operation to compute with, the numbers that fit."""

    name: str
    text: str
    field: str
    operation: str
    numbers: range

    def question(self, item: str, number: int) -> str:
        return self.text.format(item=item, number=number)

    def result(self, value: int, number: int) -> int:
        if self.operation == "multiply":
            return value * number
        return value + number if self.operation == "add" else value - number


FORMS = (
    Form("cost", "What do {number} {item}s cost?", "price", "multiply", range(2, 10)),
    Form("weigh", "What do {number} {item}s weigh?", "weight", "multiply", range(2, 10)),
    Form(
        "left", "How many {item}s are left if {number} are sold?", "stock", "subtract", range(2, 20)
    ),
    Form("more", "How many {item}s are there if {number} more come?", "stock", "add", range(2, 20)),
    Form("ship", "What does a {item} cost with {number} shipping?", "price", "add", range(2, 20)),
)


def make_task(form: Form, item: str, number: int) -> Task:
    """One question; its payload holds the answer and the steps of a perfect run."""
    question = form.question(item, number)
    named = f"{item}s" if "{item}s" in form.text else item
    value = SHOP[item][form.field]
    answer = form.result(value, number)
    return Task(
        id=f"{form.name}-{item}-{number}",
        suite=SUITE,
        split="held_out" if is_held_out(question) else "train",
        prompt=question,
        payload={
            "form": form.name,
            "item": named,
            "field": form.field,
            "operation": form.operation,
            "numbers": [value, number],
            "answer": answer,
            "steps": [
                {
                    "tool": "look_up",
                    "arguments": {"item": named, "field": form.field},
                    "result": str(value),
                },
                {
                    "tool": "calculate",
                    "arguments": {"a": value, "operation": form.operation, "b": number},
                    "result": str(answer),
                },
            ],
        },
    )


def is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % 100 < HELD_OUT_PERCENT


def all_questions() -> Iterator[tuple[Form, str, int]]:
    """Every question there is: forms x items x numbers."""
    return itertools.chain.from_iterable(
        itertools.product((form,), SHOP, form.numbers) for form in FORMS
    )


def tasks(split: str, count: int | None = None, seed: int = 0) -> list[Task]:
    """``count`` distinct questions of ``split`` (``train``, ``held_out``), ordered by ``seed``."""
    held_out = split == "held_out"
    chosen = [
        parts for parts in all_questions() if is_held_out(parts[0].question(*parts[1:])) == held_out
    ]
    random.Random(seed).shuffle(chosen)
    return [make_task(*parts) for parts in chosen[:count]]


def train() -> list[Task]:
    return tasks("train")


def held_out() -> list[Task]:
    return tasks("held_out")
