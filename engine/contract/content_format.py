"""Detection of how a chat template takes a message's content: as one text or as its parts.

vLLM (``--chat-template-content-format auto``) checks whether the template iterates over the
content. If it does, every content is passed as a list of parts, a plain text as a list of one.
Otherwise the texts are joined line by line. This module makes the same check at the same places, so
that a prompt rendered here is the one that vLLM renders.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes


def takes_parts(template: nodes.Template) -> bool:
    """Return whether the parsed ``template`` iterates over the parts of a message's content.

    As in vLLM, it does not if its variables cannot be followed.
    """
    messages = _followed(template, "messages")
    if messages is None:
        return False
    loops = list(template.find_all(nodes.For))
    targets = [loop.target for loop in loops if _is_any(loop.iter, messages)]
    message_names = {target.name for target in targets if isinstance(target, nodes.Name)}
    if not all(isinstance(target, nodes.Name) for target in targets):
        return False
    in_macros = _content_in_macros(template, message_names)
    for loop in loops:
        if _is_any(loop.iter, message_names, "content") or (
            isinstance(loop.iter, nodes.Name)
            and loop.iter.name in in_macros.get(id(loop), {"content"})
        ):
            return isinstance(loop.target, nodes.Name)
    return False


def _followed(template: nodes.Template, first: str) -> set[str] | None:
    """Return the variables that are set to ``first`` or to a part of it.

    Return ``None`` if anything but a variable is set to such a value.
    """
    names, waiting = {first}, [first]
    while waiting:
        name = waiting.pop()
        for assignment in template.find_all(nodes.Assign):
            if not _is_any(assignment.node, {name}):
                continue
            if not isinstance(assignment.target, nodes.Name):
                return None
            if assignment.target.name not in names:
                names.add(assignment.target.name)
                waiting.append(assignment.target.name)
    return names


def _content_in_macros(
    template: nodes.Template, message_names: set[str]
) -> dict[int, frozenset[str]]:
    """Return the parameters of macros that are given a content, for each loop in a macro.

    The key is the loop's ``id``.
    """
    found: dict[int, frozenset[str]] = {}
    calls = list(template.find_all(nodes.Call))
    for macro in template.find_all(nodes.Macro):
        given: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                values = [
                    *zip((parameter.name for parameter in macro.args), call.args, strict=False),
                    *((keyword.key, keyword.value) for keyword in call.kwargs),
                ]
                given |= {
                    name for name, value in values if _is_any(value, message_names, "content")
                }
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = found.get(id(loop), frozenset()) | given
    return found


def _is_any(node: nodes.Node | None, names: Iterable[str], key: str | None = None) -> bool:
    """Return whether ``node`` is a variable of one of ``names``, or its attribute or item ``key``.

    Filters and slices make no difference.
    """
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == key):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names
