"""Makes the policy that the conformance suite expects: ``make_policy.py DIR``.

A tiny Qwen3-shaped model that knows a handful of replies by heart, so that an engine that really
samples (the embedded one, or vLLM serving DIR) says things that exercise its parsers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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


def make(directory: Path) -> None:
    """Write the policy to ``directory``: a few seconds on one core."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.recipes.models.tiny import TinyShape, make_policy
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    texts = [text for _, replies in REPLIES.values() for text in replies]
    size = train_tokenizer(directory, [*texts, *REPLIES, str(TOOLS)] * 4, vocab_size=640)
    # Heads of 32 and untied embeddings: vLLM's CPU attention knows no smaller heads, and there a
    # reload leaves a tied output layer stale.
    shape = TinyShape(hidden=64, heads=2, kv_heads=1, context=CONTEXT, tied=False)
    make_policy(directory, shape, vocab_size=size, seed=1)
    tokenizer = Tokenizer(directory)
    rows, starts, certain = [], [], []
    for asked, (with_tools, replies) in REPLIES.items():
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.encode(tokenizer.render(messages, TOOLS if with_tools else None))
        for reply in replies:
            rows.append(prompt + tokenizer.encode(reply + "<|im_end|>"))
            starts.append(len(prompt))
            certain.append(len(replies) == 1)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        labels[index, start : len(row)] = ids[index, start : len(row)]
    learnt = labels.masked_fill(~torch.tensor(certain)[:, None], -100)
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
