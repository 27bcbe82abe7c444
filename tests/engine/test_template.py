"""Prompts rendered without transformers equal those of its ``apply_chat_template``."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest

from bridle.engine.contract.tokenizer import (
    TemplateError,
    Tokenizer,
    compile_chat_template,
    template_message,
)
from bridle.recipes.models.tiny_tokenizer import CHATML_TOOLS_TEMPLATE

TEMPLATES = {
    "tiny": CHATML_TOOLS_TEMPLATE,
    **{
        path.stem: path.read_text()
        for path in sorted((Path(__file__).parents[1] / "lineage" / "templates").glob("*.jinja"))
    },
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Finds „ä“ <b>&</b> 'quotes'",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["key"],
            },
        },
    }
]


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdef123",
                "type": "function",
                "function": {"name": "lookup", "arguments": arguments},
            }
        ],
    }


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdef123", "name": "lookup", "content": content}


USER = {"role": "user", "content": "What is 'blue' & <red>?\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "answered": [USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "sure?"}],
    "tool": [USER, call('{"key": "blue", "n": 3}'), result("7")],
    "tool with objects": [USER, call({"key": "ü"}), result([{"type": "text", "text": "7"}])],
    "tool answered": [
        USER,
        call("{}"),
        result("7"),
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "and red?"},
    ],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "7", "reasoning_content": "Hm."},
        {"role": "user", "content": "ok"},
    ],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_transformers(tiny_dir: Path, tmp_path: Path, template: str) -> None:
    theirs, ours = both(tiny_dir, tmp_path, template)
    choices = product(CONVERSATIONS, (None, TOOLS), (True, False))
    for conversation, tools, add_generation_prompt in choices:
        messages = CONVERSATIONS[conversation]
        try:
            expected = theirs.apply_chat_template(
                [template_message(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=False,
            )
        except jinja2.TemplateError as refusal:
            with pytest.raises(TemplateError, match=str(refusal)):
                ours.render(messages, tools)
            continue
        rendered = ours.render(
            messages, tools, add_generation_prompt=add_generation_prompt, enable_thinking=False
        )
        assert rendered == expected, (conversation, bool(tools))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_final_message_to_continue_ends_the_prompt_as_in_transformers(
    tiny_dir: Path, tmp_path: Path, template: str
) -> None:
    theirs, ours = both(tiny_dir, tmp_path, template)
    for said in ("The", "The ", " The"):
        messages = [USER, {"role": "assistant", "content": said}]
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        rendered = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered == expected
        assert rendered.endswith((said, said.strip()))


def both(tiny_dir: Path, directory: Path, template: str | None = None) -> tuple[Any, Tokenizer]:
    """The tokenizer of transformers and ours, with one of :data:`TEMPLATES`."""
    from transformers import PreTrainedTokenizerFast

    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (directory / name).exists():
            (directory / name).write_text((tiny_dir / name).read_text())
    if template is not None:
        (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    return PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer(directory)


def test_a_final_message_that_cannot_be_continued_is_refused(tiny_dir: Path) -> None:
    image = {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(TemplateError, match="no text to continue"):
        Tokenizer(tiny_dir).render(
            [USER, image], add_generation_prompt=False, continue_final_message=True
        )


SHOWN = "{{ message.role }}:{% for part in PARTS %}[{{ part.text | trim }}]{% endfor %};"
IN_A_LOOP = "{% for message in messages %}" + SHOWN + "{% endfor %}"
EACH = "{% for item in CONTENT %}[{{ item.text }}]{% endfor %}"
WRITTEN = "{% macro written(CONTENT) %}" + EACH + "{% endmacro %}"
IN_A_MACRO = WRITTEN + "{% for m in messages %}{{ m.role }}:{{ written(m.content) }};{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        IN_A_LOOP.replace("PARTS", "message['content']"),
        "{% set rest = messages[1:] %}{% for m in rest %}"
        "{% for x in m.content | list %}{% endfor %}{% endfor %}"
        + IN_A_LOOP.replace("PARTS", "message.content"),
        "{% for m in messages %}{% set content = m.content %}{{ m.role }}:"
        "{% for x in content %}[{{ x.text }}]{% endfor %};{% endfor %}",
        IN_A_MACRO.replace("CONTENT", "given"),
        IN_A_MACRO.replace("CONTENT", "said").replace("(m.content)", "(said=m.content | list)"),
    ],
)
def test_a_template_that_goes_through_the_parts_is_given_them(
    tiny_dir: Path, tmp_path: Path, template: str
) -> None:
    """A tool's result is one text all the same."""
    tokenizer = templated(tiny_dir, tmp_path, template.replace(" | trim", ""))
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    said = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]

    assert tokenizer.render(said) == "user:[a][][b];user:[c];"
    assert tokenizer.render([said[0], {"role": "assistant", "content": None}]).endswith(
        "assistant:;"
    )
    answered = templated(tiny_dir, tmp_path, template + "{{ messages[-1].content }}")
    assert answered.render([USER, result(parts)]).endswith("a\n\nb")


@pytest.mark.parametrize(
    "before",
    [
        "",
        WRITTEN.replace("CONTENT", "content"),
        "{% macro m(x) %}{% for y in x %}{% endfor %}{% endmacro %}{{ m(messages) }}",
        "{% set ns = namespace() %}{% set ns.rest = messages[1:] %}"
        "{% for m in messages %}{% if m.content is not string %}"
        "{% for x in m.content %}{% endfor %}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_is_given_one_text(
    tiny_dir: Path, tmp_path: Path, before: str
) -> None:
    """Neither is one whose variables vLLM cannot follow."""
    plain = "{% for message in messages %}{{ message.content }};{% endfor %}"
    tokenizer = templated(tiny_dir, tmp_path, before + plain)
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]

    assert tokenizer.render([{"role": "user", "content": parts}, call("{}")]) == "a\nb;;"


def templated(tiny_dir: Path, directory: Path, template: str) -> Tokenizer:
    (directory / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory)


def test_encoding_equals_transformers(tiny_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tiny_dir)
    for text in ("<|im_start|>user\nnaïve 日本 😀 12<|im_end|>", "", "  <think>x</think>"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert Tokenizer(tiny_dir).encode(text) == expected


def test_a_template_may_refuse_its_messages(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(TemplateError, match="no system role"):
        Tokenizer(tmp_path).render([USER])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": {"no": "text"}}],
        [USER, call('{"key": ')],
        [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [],
    ],
)
def test_messages_that_cannot_be_rendered_are_a_template_error(
    tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(TemplateError):
        tokenizer.render(messages)


TEXT_ONLY = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "message 1 has content of type 'image_url', and the model's chat template renders text "
            "only: leave it out, or serve a model that reads it",
        ),
        (7, "the chat template cannot render these messages: can only concatenate str"),
    ],
)
def test_content_that_a_template_cannot_render_is_named(
    tmp_path: Path, tiny_dir: Path, content: Any, message: str
) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(TEXT_ONLY)
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(TemplateError, match=f"^{re.escape(message)}") as raised:
        tokenizer.render([{"role": "user", "content": content}])
    assert "TypeError" not in str(raised.value)


def test_a_model_without_a_template_says_so(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(tmp_path).render([USER])
    with pytest.raises(TemplateError, match="does not parse"):
        compile_chat_template("{% if %}")


def test_a_template_in_the_tokenizers_configuration_is_found(
    tmp_path: Path, tiny_dir: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    config = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}!"}],
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).render([USER]) == "<s>!"


TOOL_USE = "{{ tools | length }}{% for message in messages %} {{ message.role }}{% endfor %}"
DEFAULT = "{% for message in messages %}{{ message.role }} {% endfor %}"


def named_in_the_configuration(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"default": DEFAULT, "tool_use": TOOL_USE}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def named_by_files(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(DEFAULT)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)


@pytest.mark.parametrize("write", [named_in_the_configuration, named_by_files])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_a_template_of_its_own_for_tools_is_used_as_in_transformers(
    tiny_dir: Path, tmp_path: Path, write: Any, tools: Any
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_dir / name).read_text())
    write(tmp_path)
    theirs, ours = both(tiny_dir, tmp_path)
    expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
    assert ours.render([USER], tools, add_generation_prompt=False) == expected
