"""The questions that the judges of frameworks ask, and the answer of the scripted engine."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

MODEL = "policy"
QUESTION = "What is two and two?"
HI: list[Any] = [{"role": "user", "content": QUESTION}]
ANSWER = "The answer is four."
TURNS = 6
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "time")
]


class City(BaseModel):
    """A city and the number of its people."""

    name: str
    people: int


OSLO = City(name="Oslo", people=700000)
EXACTLY = f"Say exactly: {json.dumps(OSLO.model_dump())}"
