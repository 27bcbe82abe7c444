"""Tools without parameters, on which some chat templates raise.

Harnesses declare such tools, and an engine renders them without a schema. Seed-OSS's template reads
the properties of every schema. Where a template raises, the tool gets a schema without properties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from bridle.engine.contract.errors import TemplateError
from bridle.proxy.wire.canonical import Request
from bridle.store.records import Note

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer

PARAMETERS_ADDED: Final = "tool_parameters_added"
"""Name of the note on a call whose tools got an empty schema; the detail names the first."""
_EMPTY: Final[dict[str, Any]] = {"type": "object", "properties": {}}


def refuses_bare_tools(tokenizer: Tokenizer) -> bool:
    """Return whether a template raises on a tool without parameters, or without properties.

    The template must render the same conversation with another tool.
    """
    bare: list[dict[str, Any] | None] = [None, {}, {"type": "object"}]
    return _renders(tokenizer, _EMPTY) and not all(_renders(tokenizer, one) for one in bare)


def _renders(tokenizer: Tokenizer, parameters: dict[str, Any] | None) -> bool:
    function = {"name": "look", "description": "Look around.", "parameters": parameters}
    try:
        tokenizer.render(
            [{"role": "user", "content": "Go on."}], [{"type": "function", "function": function}]
        )
    except TemplateError:
        return False
    return True


def with_parameters(request: Request) -> tuple[Request, tuple[Note, ...]]:
    """Return ``request`` with a schema for each tool that has none, and a note if there is one."""
    tools, bare = [], []
    for tool in request.tools:
        function = tool.get("function") or {}
        given = function.get("parameters") or {}
        if "properties" not in given:
            bare.append(str(function.get("name")))
            tool = {**tool, "function": {**function, "parameters": {**_EMPTY, **given}}}
        tools.append(tool)
    if not bare:
        return request, ()
    return structs.replace(request, tools=tuple(tools)), (Note(PARAMETERS_ADDED, bare[0][:200]),)
