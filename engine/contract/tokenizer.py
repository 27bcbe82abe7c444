"""The tokenizer and the chat template of a model directory.

They need only ``tokenizers`` and Jinja, so the proxy and the scripted engine need neither torch nor
transformers. ``tests/engine/test_template.py`` checks that the rendering equals transformers' own
``apply_chat_template``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as BackendTokenizer

from bridle.engine.contract import harmony
from bridle.engine.contract.content_format import takes_parts
from bridle.engine.contract.errors import TemplateError
from bridle.errors import BridleError

CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATES_DIRECTORY = "additional_chat_templates"

# Texts come one at a time: a thread pool would gain nothing, and not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerNotRead(BridleError, ValueError):
    """A directory holds no tokenizer that can be read; the message names it."""


class ArgumentsNotJson(TemplateError):
    """A tool call's arguments are broken, so that no template can render them."""


class Tokenizer:
    """The tokenizer and chat template of one model directory.

    Raises :class:`TokenizerNotRead` when there is none.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.directory = Path(model_dir)
        config_path = self.directory / "tokenizer_config.json"
        try:
            self.backend = BackendTokenizer.from_file(str(self.directory / "tokenizer.json"))
            self.config: dict[str, Any] = (
                json.loads(config_path.read_text()) if config_path.exists() else {}
            )
        except Exception as error:
            # The tokenizers library raises bare exceptions for files that it cannot read.
            raise TokenizerNotRead(f"no tokenizer in {self.directory}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``; special tokens in the text are recognised.

        ``add_special_tokens`` adds those, if any, that the tokenizer itself puts around a bare
        text.
        """
        # Unlike encode, this neither finds offsets nor keeps other threads waiting.
        (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    @cached_property
    def beginning(self) -> list[int]:
        """Ids of the special tokens, if any, that the tokenizer itself puts before a bare text."""
        (found,) = self.backend.encode_batch_fast(["a"], add_special_tokens=True)
        marked = zip(found.ids, found.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda pair: pair[1], marked)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are not yet a character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def vocabulary(self) -> list[bytes]:
        """Return the bytes that each token id adds to a text."""
        return token_bytes(self.backend)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by name (``bos_token``, ``eos_token`` …) as the template sees them."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        found = {}
        for name in names:
            value = self.config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a reply, as for vLLM.

        They are the tokenizer's own, and those that ``generation_config.json`` names, or
        ``config.json`` if that file is missing.
        """
        token = self.special_tokens.get("eos_token")
        found = {self.token_id(token)} if token else set()
        for name in ("generation_config.json", "config.json"):
            path = self.directory / name
            if path.exists():
                config = json.loads(path.read_text())
                eos = config.get("eos_token_id")
                if eos is None:
                    eos = (config.get("text_config") or {}).get("eos_token_id")
                found.update(eos if isinstance(eos, list) else [eos])
                break
        return frozenset(token_id for token_id in found if token_id is not None)

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of token ids: the larger of the tokenizer's own number and the model's.

        The model's number is padded. It counts if ``config.json`` has it.
        """
        size: int = self.backend.get_vocab_size(with_added_tokens=True)
        for part in (self._model_config, self._model_config.get("text_config") or {}):
            size = max(size, part.get("vocab_size") or 0)
        return size

    @cached_property
    def _model_config(self) -> Mapping[str, Any]:
        """The model's ``config.json``.

        It is empty if it cannot be read, which is left to the loader of the model to report.
        """
        try:
            config = json.loads((self.directory / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}

    @cached_property
    def chat_template_source(self) -> str:
        source = self._template_sources.get("default")
        if source is None:
            raise TemplateError(
                f"{self.directory} has no chat template: add {CHAT_TEMPLATE_FILE} "
                "or chat_template in tokenizer_config.json"
            )
        return source

    @cached_property
    def tools_template_source(self) -> str:
        """The template of conversations with tools, for which some models have one of its own."""
        return self._template_sources.get("tool_use") or self.chat_template_source

    @cached_property
    def _template_sources(self) -> dict[str, str]:
        """Templates by name, from the places where transformers looks for them."""
        path = self.directory / CHAT_TEMPLATE_FILE
        if path.exists():
            others = (self.directory / CHAT_TEMPLATES_DIRECTORY).glob("*.jinja")
            return {"default": path.read_text()} | {one.stem: one.read_text() for one in others}
        source = self.config.get("chat_template")
        if isinstance(source, list):
            return {entry["name"]: entry["template"] for entry in source}
        return {"default": source} if isinstance(source, str) else {}

    @cached_property
    def renders_by_harmony(self) -> bool:
        """Return whether the model is gpt-oss and can be rendered as vLLM renders it."""
        return self._model_config.get("model_type") == harmony.MODEL_TYPE and harmony.available()

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return compile_chat_template(self.chat_template_source)

    @cached_property
    def _compiled_for_tools(self) -> jinja2.Template:
        if self.tools_template_source == self.chat_template_source:
            return self._compiled
        return compile_chat_template(self.tools_template_source)

    @cached_property
    def _takes_parts(self) -> bool:
        return takes_parts(self._compiled.environment.parse(self.chat_template_source))

    @cached_property
    def _takes_parts_for_tools(self) -> bool:
        return takes_parts(self._compiled_for_tools.environment.parse(self.tools_template_source))

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of ``messages`` (chat shape, as clients send them).

        With ``continue_final_message``, it ends with the text of the last one, whose turn stays
        open.

        gpt-oss is rendered as vLLM renders it (:mod:`bridle.engine.contract.harmony`), not by its
        template.

        Raise :class:`TemplateError` if the template refuses or cannot render them.
        """
        if self.renders_by_harmony and not continue_final_message:
            effort = template_kwargs.get("reasoning_effort")
            return harmony.render(
                list(messages),
                tools,
                add_generation_prompt=add_generation_prompt,
                reasoning_effort=effort,
            )
        messages = list(messages)
        try:
            parts = self._takes_parts_for_tools if tools else self._takes_parts
            shaped = [template_message(message, parts) for message in messages]
            if continue_final_message:
                shaped[-1] = _marked(shaped[-1])
            template = self._compiled_for_tools if tools else self._compiled
            text = template.render(
                messages=shaped,
                tools=[template_tool(tool) for tool in tools] if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self.special_tokens | template_kwargs),
            )
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The template did something with a value of these messages that does not work on it.
            raise TemplateError(_unrenderable(messages, error)) from error
        return _up_to_mark(text) if continue_final_message else text


def _unrenderable(messages: Sequence[Mapping[str, Any]], error: Exception) -> str:
    """Return the reason why a template failed on these messages, with a remedy if one is known."""
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "part"))
            if "text" not in part:
                return (
                    f"message {number} has content of type {kind!r}, and the model's chat template "
                    "renders text only: leave it out, or serve a model that reads it"
                )
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return f"the chat template cannot render these messages: {reason}"


_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


def token_bytes(backend: BackendTokenizer) -> list[bytes]:
    """Return the bytes of every token id.

    They come from the pieces of a byte-level or a SentencePiece vocabulary. Added tokens stand for
    their own text; an id that is not in use is empty.
    """
    added = {id: str(token.content) for id, token in backend.get_added_tokens_decoder().items()}
    pieces = {id: piece for piece, id in backend.get_vocab(with_added_tokens=True).items()}
    alphabet = _byte_alphabet()
    # A character outside the alphabet becomes one that Latin-1 does not have.
    table = {code: alphabet.get(chr(code), 0x100) for code in range(0x200)}
    found = [b""] * (max(pieces, default=-1) + 1)
    for id, piece in pieces.items():
        if id in added:
            found[id] = added[id].encode()
        elif piece.startswith("<0x") and (byte := _BYTE_PIECE.fullmatch(piece)):
            found[id] = bytes((int(byte.group(1), 16),))
        else:
            found[id] = _piece_bytes(piece, table)
    return found


def _piece_bytes(piece: str, table: Mapping[int, int]) -> bytes:
    try:
        if _BLANK not in piece:
            return piece.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        pass
    # SentencePiece writes text as it is, but for the blank.
    return piece.replace(_BLANK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable stand-ins for bytes to the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""The mark that transformers uses. The space at its end is missing where a template strips the
text."""


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    parts = [dict(part) for part in content]
    text = next((part for part in reversed(parts) if isinstance(part.get("text"), str)), None)
    if text is None:
        raise TemplateError("the final message has no text to continue")
    text["text"] += _MARK
    return {**message, "content": parts}


def _up_to_mark(text: str) -> str:
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise TemplateError("the chat template does not show the final message to continue")
    return before if after.startswith(" ") else before.rstrip()


def template_message(message: Mapping[str, Any], parts: bool = False) -> dict[str, Any]:
    """Return a chat message as vLLM passes it to the template.

    Text parts are joined to a string, and missing content is the empty string. For a template that
    takes ``parts``, content is a list, except in a tool's result. Tool-call arguments are parsed to
    objects, and reasoning is readable under both of its names.
    """
    shaped = dict(message)
    shaped["content"] = _template_content(
        message.get("content"), parts, joined=not parts or message.get("role") == "tool"
    )
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = [_template_tool_call(call) for call in shaped["tool_calls"]]
    reasoning = shaped.get("reasoning", shaped.get("reasoning_content"))
    if reasoning is not None:
        shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    return shaped


def template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as vLLM passes it to the template.

    It has the fields of ``ChatCompletionToolsParam.model_dump`` in the order of that method. The
    description and the parameters are included even if they are missing.
    """
    function, deferred = tool.get("function"), tool.get("defer_loading")
    if not isinstance(function, Mapping):
        raise TemplateError("a tool without a function")
    shaped = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading")}
    if optional["defer_loading"] is None:
        optional["defer_loading"] = deferred
    shaped |= {name: value for name, value in optional.items() if value is not None}
    made: dict[str, Any] = {"type": tool.get("type", "function"), "function": shaped}
    return made if deferred is None else {**made, "defer_loading": deferred}


def _template_content(content: Any, parts: bool, *, joined: bool) -> Any:
    if content is None:
        return "" if joined else []
    if isinstance(content, str):
        return content if joined else [{"type": "text", "text": content}]
    if not joined or not isinstance(content, list):
        return content
    texts = [part.get("text") or "" for part in content if part.get("type") == "text"]
    if len(texts) < len(content):
        return content
    # Where vLLM makes no list of parts, it passes empty ones over.
    return "\n".join(text for text in texts if text or parts)


def _template_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(call.get("function"), Mapping):
        raise TemplateError("a tool call without a function")
    name, arguments = call["function"].get("name"), call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise ArgumentsNotJson(f"tool call {name!r}: arguments are not JSON") from error
    # Some templates write a function as JSON: the order is that of the types vLLM validates by.
    shaped = {"id": call.get("id"), "function": {"arguments": arguments, "name": name}}
    return {**shaped, "type": call.get("type", "function")}


def compile_chat_template(source: str) -> jinja2.Template:
    """Compile ``source`` in the sandbox that transformers gives chat templates.

    Semantics follow transformers' ``utils/chat_template_utils.py``: trimmed blocks, ``tojson``
    without HTML escapes, ``raise_exception``, ``strftime_now``, loop controls, and the
    ``generation`` tag, which renders its body.
    """

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **kwargs: Any) -> str:
        kwargs.setdefault("ensure_ascii", False)
        return json.dumps(value, indent=indent, **kwargs)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template does not parse: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}…{% endgeneration %}``.

    It marks assistant text for training masks.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance-level set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
