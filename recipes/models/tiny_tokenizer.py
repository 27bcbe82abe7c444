"""Small tokenizers trained on given text, in the form of a model directory. Torch is not needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bridle.engine.contract.tokenizer import CHAT_TEMPLATE_FILE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
)

CHATML_TOOLS_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call functions. Their signatures:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer a call as <tool_call>{\"name\": …, \"arguments\": …}</tool_call>.' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A ChatML template with Hermes tool calls. It renders history as it was generated and strips
nothing."""


def train_tokenizer(
    directory: Path,
    texts: Iterable[str],
    *,
    vocab_size: int = 2048,
    min_frequency: int = 0,
    template: str = CHATML_TOOLS_TEMPLATE,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    eos_token: str = "<|im_end|>",  # noqa: S107 - a word of the vocabulary
) -> int:
    """Train a byte-level BPE tokenizer on ``texts`` and write it with its template.

    Returns the vocabulary's actual size. Special tokens are ChatML's unless others are given (the
    first one pads, ``eos_token`` ends a reply); the Hermes and thinking markup are single tokens
    that decode as text, as in Qwen3.

    Every digit is a token of its own. Words whose pieces occur less than ``min_frequency`` times
    stay in pieces, which a tiny model can copy too when the word itself has never been seen.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    splitters: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ]
    splitters.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(MARKUP_TOKENS),
            min_frequency=min_frequency,
            special_tokens=list(special_tokens),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(list(MARKUP_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": eos_token,
                "pad_token": special_tokens[0],
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
    )
    (directory / CHAT_TEMPLATE_FILE).write_text(template)
    return int(tokenizer.get_vocab_size())
