"""Responses tools as chat functions, and the client's tool behind a function's name.

Engines know only functions. Functions inside a ``namespace`` tool become ``{namespace}__{name}``;
a ``custom`` (freeform) tool becomes a function with the one string argument ``input``; tools that a
provider runs itself are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from bridle.proxy.dialects.body import Json, invalid, json_text, typed
from bridle.proxy.dialects.functions import arguments_object, function_tool, named_function
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.dialects.unsupported import refuse_kind

SEPARATOR: Final = "__"


class ClientTool(msgspec.Struct, frozen=True, gc=False):
    """A client's tool that an engine's function stands for."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """True if it is a freeform tool, whose input is a text and not an object."""


class _Grammar(msgspec.Struct, gc=False):
    definition: str | None = None
    syntax: str | None = None


class _Tool(msgspec.Struct, gc=False):
    """A tool of any type that is known."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: _Grammar | None = None
    defer_loading: bool | None = None
    tools: list[Json] | None = None


class _Named(msgspec.Struct, gc=False):
    name: str = ""
    namespace: str | None = None


class _Choice(_Named, gc=False):
    """A ``tool_choice`` of any type that is known."""

    mode: str | None = None
    tools: list[_Named] | None = None


_Required = Mapping[str, tuple[str, ...]]
_TOOLS: Final[_Required] = dict.fromkeys(("function", "custom", "namespace"), ("name",))
_CHOICES: Final[_Required] = {"function": ("name",), "custom": ("name",), "allowed_tools": ()}


REFUSED: Final[Mapping[str, str]] = {
    "file_search": "send what the files say in 'input'",
    "mcp": "connect to the server and send its tools as functions",
}
"""Tools that bring content or further tools which only the provider has."""


class ToolList:
    """A request's tools in chat shape, in the client's order, while they are collected."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self.chat: list[Json] = []
        self.client: dict[str, ClientTool] = {}
        """The client's tools by the name of the function that stands for each."""

    def add(self, tools: Sequence[Json], field: str, namespace: str | None = None) -> None:
        """Add the tools. Raise ``ApiError`` (400) that names the field."""
        for index, tool in enumerate(tools):
            self._add(tool, f"{field}[{index}]", namespace)

    def choose(self, choice: str | Json | None) -> Any:
        """Return ``tool_choice`` in chat shape, and remove the tools that it does not allow."""
        if choice is None or choice in ("auto", "none"):
            return choice if self.chat else None
        if choice == "required":
            return self._required()
        if isinstance(choice, str):
            raise invalid("tool_choice", "must be 'auto', 'none', 'required' or an object")
        kind, named = typed(choice, _Choice, _CHOICES, "tool_choice")
        if named is None:
            self._transcript.note("tool_choice_dropped", kind)
            return "auto" if self.chat else None
        if kind == "allowed_tools":
            return self._allow(named)
        function = flat_name(named.name, named.namespace)
        if function not in self.client:
            raise invalid("tool_choice", f"function {function!r} is not among 'tools'")
        return named_function(function)

    def _add(self, given: Json, field: str, namespace: str | None) -> None:
        kind, tool = typed(given, _Tool, _TOOLS, field)
        refuse_kind(kind, REFUSED, field)
        if tool is None or (kind == "namespace" and namespace is not None):
            self._transcript.note("tool_dropped", kind)
            return
        if kind == "namespace":
            self.add(tool.tools or (), f"{field}.tools", tool.name)
            self._transcript.note("namespace_flattened", tool.name)
            return
        function = flat_name(tool.name, namespace)
        if function in self.client:
            self._transcript.note("tool_dropped", f"second {function}")
            return
        if tool.defer_loading:
            self._transcript.note("defer_loading_ignored")
        if kind == "custom":
            self._transcript.note("custom_tool_as_function", tool.name)
            chat = _custom(tool, function)
        else:
            schema = f"{field}.parameters"
            chat = function_tool(
                function, tool.description, tool.parameters, schema, strict=tool.strict
            )
        self.chat.append(chat)
        self.client[function] = ClientTool(tool.name, namespace, custom=kind == "custom")

    def _allow(self, choice: _Choice) -> str | None:
        allowed = {flat_name(tool.name, tool.namespace) for tool in choice.tools or () if tool.name}
        self.chat = [tool for tool in self.chat if tool["function"]["name"] in allowed]
        if choice.mode == "required":
            return self._required()
        return "auto" if self.chat else None

    def _required(self) -> str | None:
        if self.chat:
            return "required"
        self._transcript.note("tool_choice_dropped", "required without usable tools")
        return None


def flat_name(name: str, namespace: str | None) -> str:
    """Return the engine's name of a function inside ``namespace``."""
    if not namespace:
        return name
    return namespace + (name if namespace.endswith(SEPARATOR) else SEPARATOR + name)


def custom_arguments(text: str) -> str:
    """Return a freeform tool's input as the arguments of the function that stands for it."""
    return json_text({"input": text}, "input")


def custom_input(arguments: str) -> str:
    """Return the input in such arguments: the inverse of :func:`custom_arguments`.

    Arguments of another shape are the input themselves.
    """
    given = arguments_object(arguments).get("input")
    return given if isinstance(given, str) else arguments


def _custom(tool: _Tool, function: str) -> Json:
    description = tool.description or ""
    if tool.format is not None and tool.format.definition is not None:
        syntax = tool.format.syntax or "grammar"
        description += (
            f"\n\nThe input must follow this {syntax} definition:\n{tool.format.definition}"
        )
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return function_tool(function, description.strip(), parameters, "parameters")
