"""Makes the policy that the conformance suite expects: ``make_policy.py DIR``.

A tiny Qwen3-shaped model that knows a handful of replies by heart, so that an engine that really
samples (the embedded one, or vLLM serving DIR) says things that exercise its parsers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]

_ONE_CALL = (
    '<tool_call>\n{"name": "lookup", "arguments": {"key": "blue", "limit": 3}}\n</tool_call>'
)
_OTHER_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>'

REPLIES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "text": (False, ("The answer is forty two, and nothing else.",)),
    "count": (False, (" ".join(f"line {number};" for number in range(1, 13)),)),
    "unicode": (False, ("Grüße aus 東京 😀!",)),
    "think": (False, ("<think>\nAn easy one.\n</think>\n\nDone.",)),
    "flip": (False, ("heads", "tails")),
    "call": (True, (f"Let me look.\n{_ONE_CALL}",)),
    "calls": (True, (f"{_ONE_CALL}\n{_OTHER_CALL}",)),
    "broken": (True, ('<tool_call>\n{"name": "lookup", "arguments": \n</tool_call>',)),
}
"""User message to (whether tools are offered, the equally likely replies)."""

CONTEXT = 1024
_STEPS = 300
_GOOD_ENOUGH = 0.004
"""Nats per token of the replies that are certain."""


class Example(NamedTuple):
    """A prompt and its reply, both as ids."""

    prompt: Sequence[int]
    reply: Sequence[int]
    certain: bool = True
    """False if the prompt has other replies, so that no loss near zero can be reached."""


def make(directory: Path) -> None:
    """Write the policy to ``directory``: a few seconds on one core."""
    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    texts = [text for _, replies in REPLIES.values() for text in replies]
    train_tokenizer(directory, [*texts, *REPLIES, str(TOOLS)] * 4, vocab_size=640)
    tokenizer = Tokenizer(directory)
    examples = []
    for asked, (with_tools, replies) in REPLIES.items():
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.encode(tokenizer.render(messages, TOOLS if with_tools else None))
        for reply in replies:
            ids = tokenizer.encode(reply + "<|im_end|>")
            examples.append(Example(prompt, ids, certain=len(replies) == 1))
    learn(directory, examples)


def learn(directory: Path, examples: Sequence[Example], context: int = CONTEXT) -> None:
    """Write a policy that knows ``examples`` by heart, beside its tokenizer in ``directory``."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.recipes.models.tiny import TinyShape, make_policy

    # Heads of 32 and untied embeddings: vLLM's CPU attention knows no smaller heads, and there a
    # reload leaves a tied output layer stale.
    shape = TinyShape(hidden=64, heads=2, kv_heads=1, context=context, tied=False)
    size = Tokenizer(directory).backend.get_vocab_size()
    make_policy(directory, shape, vocab_size=size, seed=1)
    rows = [[*example.prompt, *example.reply] for example in examples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for index, (row, example) in enumerate(zip(rows, examples, strict=True)):
        start = len(example.prompt)
        labels[index, start : len(row)] = ids[index, start : len(row)]
    certain = torch.tensor([example.certain for example in examples])
    learnt = labels.masked_fill(~certain[:, None], -100)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(_STEPS):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = cross_entropy(logits, labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            if cross_entropy(logits, learnt[:, 1:].flatten()) < _GOOD_ENOUGH:
                break
    else:
        raise RuntimeError("the conformance policy did not learn its replies")
    model.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the conformance suite's policy.")
    parser.add_argument("directory", type=Path, help="where to write it")
    make(parser.parse_args().directory)
