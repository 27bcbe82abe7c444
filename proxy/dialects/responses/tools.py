"""Responses tools as chat functions, and the way back from a function name to the client's tool.

Engines know only functions. Functions inside a ``namespace`` tool become ``{namespace}__{name}``;
a ``custom`` (freeform) tool becomes a function with the one string argument ``input``; tools that a
provider runs itself are dropped. :class:`ToolNames` remembers what each function stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bridle.proxy.dialects.fields import Fields, invalid, json_text
from bridle.proxy.dialects.functions import function_tool, schema_of
from bridle.proxy.dialects.turns import Transcript

Kind = Literal["function", "custom"]

SEPARATOR: Final = "__"


@dataclass(frozen=True, slots=True)
class ToolName:
    """What an engine's function name is to the client."""

    kind: Kind
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class Tools:
    """A request's tools in chat shape, in the client's order."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)

    def name(self, function: str) -> ToolName:
        """The client's tool behind ``function``; an unknown one is a function of that name."""
        return self.names.get(function) or ToolName("function", function)

    def add(self, tool: Fields, transcript: Transcript, namespace: str | None = None) -> None:
        kind = tool.need_string("type")
        if kind == "namespace" and namespace is None:
            name = tool.need_string("name")
            for inner in tool.objects("tools"):
                self.add(inner, transcript, namespace=name)
            transcript.note("namespace_flattened", name)
        elif kind == "function" or kind == "custom":
            name = tool.need_string("name")
            function = flat_name(name, namespace)
            if function in self.names:
                transcript.note("tool_dropped", f"second {function}")
                return
            if tool.boolean("defer_loading"):
                transcript.note("defer_loading_ignored")
            if kind == "custom":
                transcript.note("custom_tool_as_function", name)
            build = _custom if kind == "custom" else _function
            self.chat.append(build(tool, function))
            self.names[function] = ToolName(
                "custom" if kind == "custom" else "function", name, namespace
            )
        else:
            transcript.note("tool_dropped", kind)

    def choose(self, fields: Fields, transcript: Transcript) -> Any:
        """``tool_choice`` in chat shape; narrows the tools when only some are allowed."""
        choice = fields.raw("tool_choice")
        if choice is None or choice in ("auto", "none"):
            return choice if self.chat else None
        if choice == "required":
            return self._required(transcript)
        if isinstance(choice, str):
            raise invalid("tool_choice", "must be 'auto', 'none', 'required' or an object")
        named = Fields.of(choice, "tool_choice")
        kind = named.need_string("type")
        if kind in ("function", "custom"):
            function = flat_name(named.need_string("name"), named.string("namespace"))
            if function not in self.names:
                raise invalid("tool_choice", f"function {function!r} is not among 'tools'")
            return {"type": "function", "function": {"name": function}}
        if kind == "allowed_tools":
            return self._allow(named, transcript)
        transcript.note("tool_choice_dropped", kind)
        return "auto" if self.chat else None

    def _allow(self, named: Fields, transcript: Transcript) -> Any:
        allowed = {
            flat_name(name, tool.string("namespace"))
            for tool in named.objects("tools")
            if (name := tool.string("name")) is not None
        }
        self.chat = [tool for tool in self.chat if tool["function"]["name"] in allowed]
        if named.string("mode") == "required":
            return self._required(transcript)
        return "auto" if self.chat else None

    def _required(self, transcript: Transcript) -> Any:
        if self.chat:
            return "required"
        transcript.note("tool_choice_dropped", "required without usable tools")
        return None


def flat_name(name: str, namespace: str | None) -> str:
    """The engine's name of a function inside ``namespace``."""
    if not namespace:
        return name
    return namespace + (name if namespace.endswith(SEPARATOR) else SEPARATOR + name)


def custom_arguments(text: str) -> str:
    """A freeform tool's input as the arguments of the function that stands for it."""
    return json_text({"input": text}, "input")


def _function(tool: Fields, name: str) -> dict[str, Any]:
    return function_tool(
        name,
        tool.string("description"),
        schema_of(tool, "parameters"),
        strict=bool(tool.boolean("strict")),
    )


def _custom(tool: Fields, name: str) -> dict[str, Any]:
    description = tool.string("description") or ""
    form = tool.child("format")
    if form is not None and (grammar := form.string("definition")) is not None:
        syntax = form.string("syntax") or "grammar"
        description += f"\n\nThe input must follow this {syntax} definition:\n{grammar}"
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return function_tool(name, description.strip(), parameters)
