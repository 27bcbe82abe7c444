"""Roles that a chat template takes, and a conversation in a form that it takes.

Harnesses send several system messages, system messages between the turns, two user messages in a
row. Some templates raise on these, leave a message out, or write it in another place.
:data:`QUESTIONS` are small conversations of every such form, :func:`rules_from` reads the rules of
a template from its renderings of them, and :meth:`RoleRules.shape` applies the rules to a request:

- leading system messages become one; where a template has no system role, the first user turn
  begins with them;
- a later system message becomes a marked user text in its place, because a message that moves to
  the beginning would change every token after it;
- a reply with several tool calls becomes several with one each, every call before its result;
- a reply of tool calls alone gets a text that says so;
- neighbours of one role become one message, and user text after a tool result becomes a marked part
  of the result;
- a conversation that begins with a reply, or has no user turn, gets a user turn that says so.

A template that takes all of it gets the messages as they are. Shaping looks at neighbours alone, so
new turns that are shaped by themselves read as they do at the end of the whole conversation. The
exceptions are a reply that another assistant message follows, which is rendered in full, and the
results of several calls, which follow the reply as it was sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from msgspec import structs

from bridle.proxy.continuation.bare_tools import PARAMETERS_ADDED
from bridle.proxy.continuation.efforts import EFFORT_CHANGED
from bridle.proxy.wire.canonical import ApiError, Message, Request, ToolCall
from bridle.store.records import Note

Rendering = Sequence[object]
"""A rendering, as text or as token ids."""
Content = str | list[dict[str, Any]] | None

SYSTEMS_MERGED: Final = "system_messages_merged"
SYSTEM_AS_USER: Final = "system_message_as_user"
MESSAGES_COMBINED: Final = "messages_combined"
USER_TURN_ADDED: Final = "user_turn_added"
TOOLS_NOT_SHOWN: Final = "tools_not_shown"
CALLS_SPLIT: Final = "parallel_calls_split"
TEXT_ADDED: Final = "text_added"
FOR_TEMPLATES: Final = frozenset(
    {
        SYSTEMS_MERGED,
        SYSTEM_AS_USER,
        MESSAGES_COMBINED,
        USER_TURN_ADDED,
        TOOLS_NOT_SHOWN,
        CALLS_SPLIT,
        TEXT_ADDED,
        EFFORT_CHANGED,
        PARAMETERS_ADDED,
    }
)
"""Names of the notes on a call that was changed for the template, or whose tools it leaves out."""

NO_TEXT: Final = "(no text)"
NO_USER_TURN: Final = "(The conversation begins without a user's message.)"


class Question(NamedTuple):
    """A conversation that a template is tried on."""

    messages: tuple[Message, ...]
    tools: bool = False


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The conversations that a template takes.

    It *takes* one if it renders every message of it, in their order.
    """

    system: bool = True
    """A system message at the beginning."""
    several_systems: bool = True
    """Several system messages at the beginning."""
    late_system: bool = True
    """A system message between the turns, in its place."""
    users_in_a_row: bool = True
    assistants_in_a_row: bool = True
    user_after_results: bool = True
    """User text directly after tool results."""
    reply_first: bool = True
    """A conversation that begins with a reply."""
    no_user: bool = True
    """A conversation of system messages and replies."""
    results: bool = True
    """Tool calls and their results; ``False`` only where the template raises on them."""
    parallel_calls: bool = True
    """Several tool calls in one reply, followed by their results."""
    bare_calls: bool = True
    """A reply of tool calls without text; ``False`` only where the template raises on it."""
    tools_shown: bool = True
    """True if declared tools are rendered."""

    def shape(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Note, ...]]:
        """Return ``messages`` in a form that the template takes, and a note per kind of change."""
        if self == TAKES_ALL:
            return tuple(messages), ()
        shaper = _Shaper(self)
        return shaper.whole(messages), tuple(shaper.notes)

    def shape_tail(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages after a reply as :meth:`shape` leaves them at the whole's end."""
        return tuple(messages) if self == TAKES_ALL else _Shaper(self).turns(messages)

    def in_words(self) -> tuple[str, ...]:
        """Return the changes that the rules make, for ``bridle doctor``."""
        return tuple(_WORDS[one.name] for one in fields(self) if not getattr(self, one.name))


TAKES_ALL: Final = RoleRules()
"""The rules under which every conversation is sent as it is."""


def is_ordinary(messages: Sequence[Message]) -> bool:
    """Return whether every template with a system role and tools takes the order of ``messages``.

    The order is one system message at most, then user turns and replies in turn.
    """
    before = "system"
    for message in messages[1:] if messages and messages[0].role == "system" else messages:
        if message.role not in _MAY_FOLLOW[before]:
            return False
        before = message.role
    return True


_MAY_FOLLOW: Final[Mapping[str, frozenset[str]]] = {
    "system": frozenset({"user"}),
    "user": frozenset({"assistant"}),
    "assistant": frozenset({"user", "tool"}),
    "tool": frozenset({"tool", "assistant"}),
}


def as_reply(rules: RoleRules, reply: Message) -> Message:
    """Return a sampled reply in a form after which the template renders the next turns.

    It is not rendered itself, and the turns after it read the same.
    """
    if not reply.tool_calls:
        return reply
    if not rules.parallel_calls:
        reply = structs.replace(reply, tool_calls=reply.tool_calls[:1])
    return reply if rules.bare_calls else structs.replace(reply, content=reply.content or NO_TEXT)


def unserved(rules: RoleRules | None, request: Request) -> ApiError | None:
    """Return why a template of these rules cannot serve ``request`` at all, or ``None``.

    A harness that declares tools is refused at its first call. Its second would bring results that
    the template raises on.
    """
    if rules is None or rules.results:
        return None
    calls = request.tools and request.tool_choice != "none"
    if calls or any(one.tool_calls or one.role == "tool" for one in request.messages):
        return ApiError("invalid_request", _NO_RESULTS, status=400, param="tools")
    return None


def refusal_hint(rules: RoleRules | None, messages: Sequence[Message]) -> str:
    """Return a likely cause and the remedy, to be added to an engine's refusal of ``messages``.

    The text is empty if there is none. ``rules`` is ``None`` if the template's are not known.
    """
    return _UNKNOWN_TEMPLATE if rules is None and not is_ordinary(messages) else ""


_UNKNOWN_TEMPLATE: Final = (
    "The request has system messages after the first, or neighbours of one role, which some chat "
    "templates refuse. Start the proxy with --tokenizer MODEL, so that it can send them in a form "
    "that the model's template takes."
)
_NO_RESULTS: Final = (
    "The model's chat template refuses tool calls and their results. Serve the model with a "
    "template that has them (vLLM: --chat-template FILE) and give the proxy that template too "
    "(--tokenizer DIR), or use a harness without tools."
)
_WORDS: Final[Mapping[str, str]] = {
    "system": "system messages are refused: the first user turn begins with them",
    "several_systems": "several leading system messages are refused: they are merged into one",
    "late_system": "later system messages are refused or moved: each is sent as marked user text",
    "users_in_a_row": "two user messages in a row are refused: they are combined",
    "assistants_in_a_row": "two assistant messages in a row are refused: they are combined",
    "user_after_results": "user text after tool results is refused: it is added to the last result",
    "reply_first": "a conversation that begins with a reply is refused: a user turn is added",
    "no_user": "a conversation without a user turn is refused: one is added",
    "results": "tool calls and results are refused, and so are requests with them",
    "parallel_calls": "several tool calls in a reply are refused: each gets a reply of its own",
    "bare_calls": "tool calls without text are refused: a text that says so stands beside them",
    "tools_shown": "declared tools are not shown to the model",
}


class _Shaper:
    def __init__(self, rules: RoleRules) -> None:
        self._rules = rules
        self.notes: dict[Note, None] = {}

    def whole(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        leading = 0
        while leading < len(messages) and messages[leading].role == "system":
            leading += 1
        head, turns = self._head(messages[:leading]), self.turns(messages[leading:])
        first = "" if not turns else turns[0].role
        users = any(message.role == "user" for message in turns)
        refused = (first == "assistant" and not self._rules.reply_first) or (
            not users and not self._rules.no_user
        )
        if head and not self._rules.system:
            self._note(SYSTEM_AS_USER, "the model's template has no system role")
            lead = Message("user", _joined(message.content for message in head))
            head = ()
            if first == "user":
                lead, turns = _combined(lead, turns[0]), turns[1:]
            turns = (lead, *turns)
        elif refused:
            self._note(USER_TURN_ADDED)
            turns = (Message("user", NO_USER_TURN), *turns)
        return (*head, *turns)

    def turns(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages in a form that the template takes.

        They are the messages after the leading system messages.
        """
        rules = self._rules
        shaped: list[Message] = []
        for given in messages if rules.parallel_calls else self._one_call_each(messages):
            message = given
            if given.role == "system" and not rules.late_system:
                self._note(SYSTEM_AS_USER)
                message = Message("user", _marked(given.content, "system-message"))
            elif given.tool_calls and not given.content and not rules.bare_calls:
                self._note(TEXT_ADDED)
                message = structs.replace(given, content=NO_TEXT)
            before = shaped[-1] if shaped else None
            if before is None:
                shaped.append(message)
            elif before.role == message.role == "user" and not rules.users_in_a_row:
                self._note(MESSAGES_COMBINED, "user messages")
                shaped[-1] = _combined(before, message)
            elif before.role == message.role == "assistant" and not rules.assistants_in_a_row:
                self._note(MESSAGES_COMBINED, "assistant messages")
                shaped[-1] = _combined(before, message)
            elif before.role == "tool" and message.role == "user" and not rules.user_after_results:
                self._note(MESSAGES_COMBINED, "user text with the tool result before it")
                content = message.content
                if given.role == "user":
                    content = _marked(content, "user-message")
                shaped[-1] = structs.replace(before, content=_joined((before.content, content)))
            else:
                shaped.append(message)
        return tuple(shaped)

    def _one_call_each(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with one tool call in a reply, each before its result."""
        split: list[Message] = []
        results: dict[str | None, Message] = {}
        for at, message in enumerate(messages):
            if message.role == "tool" and results.pop(message.tool_call_id, None) is message:
                continue
            if len(message.tool_calls) < 2:
                split.append(message)
                continue
            self._note(CALLS_SPLIT)
            following = itertools.takewhile(lambda one: one.role == "tool", messages[at + 1 :])
            results = {one.tool_call_id: one for one in following}
            for number, call in enumerate(message.tool_calls):
                own = structs.replace(message, tool_calls=(call,))
                if number:
                    own = structs.replace(own, content=None, reasoning=None)
                split.append(own)
                if call.id in results:
                    split.append(results[call.id])
        return split

    def _head(self, head: Sequence[Message]) -> tuple[Message, ...]:
        if len(head) < 2 or self._rules.several_systems or not self._rules.system:
            return tuple(head)
        self._note(SYSTEMS_MERGED, str(len(head)))
        return (structs.replace(head[0], content=_joined(message.content for message in head)),)

    def _note(self, name: str, detail: str = "") -> None:
        self.notes[Note(name, detail)] = None


def _combined(one: Message, other: Message) -> Message:
    reasoning = [text for text in (one.reasoning, other.reasoning) if text]
    return structs.replace(
        one,
        content=_joined((one.content, other.content)),
        reasoning="\n".join(reasoning) or None,
        tool_calls=one.tool_calls + other.tool_calls,
        anchors=one.anchors + other.anchors,
    )


def _marked(content: Content, mark: str) -> Content:
    """Return ``content`` between tags that name its real role."""
    if isinstance(content, list):
        opening, closing = ({"type": "text", "text": f"<{end}{mark}>"} for end in ("", "/"))
        return [opening, *content, closing]
    return f"<{mark}>\n{content or ''}\n</{mark}>"


def _joined(contents: Any) -> Content:
    """Return contents joined by blank lines, or ``None`` if all are empty."""
    given = [content for content in contents if content]
    if not given:
        return None
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    parts: list[dict[str, Any]] = []
    for content in given:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


# — what a template is asked —

_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "page": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
TOOLS: Final = (_TOOL,)
_CALL_ID: Final = "a1b2c3d4e"
"""A tool-call id of the only form that every template takes."""
_OTHER_CALL_ID: Final = "b1c2d3e4f"


def _message(role: str, number: int) -> Message:
    text = f"Point {number} is an apple."
    if role == "call":
        call = ToolCall(_CALL_ID, "look_up", f'{{"word": "apple {number}"}}')
        return Message("assistant", tool_calls=(call,))
    if role == "calls":
        calls = (*_message("call", number).tool_calls, *_message("call", number + 10).tool_calls)
        other = structs.replace(calls[1], id=_OTHER_CALL_ID)
        return Message("assistant", tool_calls=(calls[0], other))
    if role == "other tool":
        return structs.replace(_message("tool", number), tool_call_id=_OTHER_CALL_ID)
    if role in ("text+call", "text+calls"):
        return structs.replace(_message(role.removeprefix("text+"), number), content=text)
    if role == "tool":
        return Message("tool", text, tool_call_id=_CALL_ID, name="look_up")
    return Message(role, text)  # type: ignore[arg-type]


_FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": ("user", "assistant", "user"),
    "system": ("system", "user"),
    "several_systems": ("system", "system", "user"),
    "system_after_reply": ("user", "assistant", "system", "user"),
    "system_after_user": ("user", "system"),
    "system_at_end": ("user", "assistant", "system"),
    "users_in_a_row": ("user", "user"),
    "later_users_in_a_row": ("user", "assistant", "user", "user"),
    "assistants_in_a_row": ("user", "assistant", "assistant", "user"),
    "reply_first": ("assistant", "user"),
    "no_user": ("system", "assistant"),
    "only_system": ("system",),
    "bare_results": ("user", "call", "tool"),
    "results": ("user", "text+call", "tool"),
    "parallel_bare_results": ("user", "calls", "tool", "other tool"),
    "parallel_results": ("user", "text+calls", "tool", "other tool"),
    "user_after_bare_results": ("user", "call", "tool", "user"),
    "user_after_results": ("user", "text+call", "tool", "user"),
    "system_after_bare_results": ("user", "call", "tool", "system"),
    "system_after_results": ("user", "text+call", "tool", "system"),
}
_CALLING: Final = frozenset({"call", "calls", "text+call", "text+calls"})
"""The roles whose conversations are only tried with tools declared."""
_DECLARED: Final = (Question((_message("user", 0),)), Question((_message("user", 0),), tools=True))


def _variants(roles: Sequence[str], tools: bool) -> list[Question]:
    """Return the conversation of these roles, and a variant of it for each message.

    A variant is the same conversation with other words in that message, or in one of its calls.
    """
    messages = tuple(_message(role, number) for number, role in enumerate(roles))
    changed = [
        Question((*messages[:at], other, *messages[at + 1 :]), tools)
        for at, message in enumerate(messages)
        for other in _in_other_words(message)
    ]
    return [Question(messages, tools), *changed]


def _in_other_words(message: Message) -> list[Message]:
    """Return the message with other words in its text, or in each of its calls one by one."""
    if isinstance(message.content, str) and len(message.tool_calls) < 2:
        return [structs.replace(message, content=message.content.replace("apple", "violet"))]
    found = []
    for at, call in enumerate(message.tool_calls):
        other = structs.replace(call, arguments=call.arguments.replace("apple", "violet"))
        calls = (*message.tool_calls[:at], other, *message.tool_calls[at + 1 :])
        found.append(structs.replace(message, tool_calls=calls))
    return found


_ASKED: Final[Mapping[tuple[str, bool], list[Question]]] = {
    (name, tools): _variants(roles, tools)
    for name, roles in _FORMS.items()
    for tools in (False, True)
    if tools or _CALLING.isdisjoint(roles)
}
"""The conversations of each form, by the name of the form and whether tools are declared: with
tools, some templates expect the first user turn in a certain place."""
QUESTIONS: Final[tuple[Question, ...]] = (
    *_DECLARED,
    *(question for variants in _ASKED.values() for question in variants),
)
"""The conversations to render, each with the beginning of a reply after it."""


def rules_from(renderings: Sequence[Rendering | None]) -> RoleRules:
    """Return the rules of a template, read from its renderings of :data:`QUESTIONS` in their order.

    A rendering is ``None`` if the template refused the conversation. A template that does not
    render a plain conversation has no rules: its own refusal says more than ours could.
    """
    bare, declared = renderings[: len(_DECLARED)]
    taken: dict[tuple[str, bool], bool] = {}
    refused: set[str] = set()
    at = len(_DECLARED)
    for form, variants in _ASKED.items():
        answers = renderings[at : at + len(variants)]
        at += len(variants)
        taken[form] = _in_order(answers)
        if answers[0] is None:
            refused.add(form[0])
    if not taken["plain", False]:
        return RoleRules()
    results = "bare_results" if "bare_results" not in refused else "results"

    def takes(*names: str) -> bool:
        """Return True if it takes all of these forms, also with tools if it takes any tools."""
        shown = [False, True] if taken["plain", True] else [False]
        return all(taken.get((name, tools), True) for name in names for tools in shown)

    return RoleRules(
        system=takes("system"),
        several_systems=takes("several_systems"),
        late_system=takes("system_after_reply", "system_after_user", "system_at_end")
        and takes(f"system_after_{results}") >= takes(results),
        users_in_a_row=takes("users_in_a_row", "later_users_in_a_row"),
        assistants_in_a_row=takes("assistants_in_a_row"),
        user_after_results=takes(f"user_after_{results}") >= takes(results),
        reply_first=takes("reply_first"),
        no_user=takes("no_user", "only_system"),
        results=results not in refused,
        parallel_calls=takes(f"parallel_{results}") >= takes(results),
        bare_calls="bare_results" not in refused or "results" in refused,
        tools_shown=bare is None or declared is None or bare != declared,
    )


def _in_order(answers: Sequence[Rendering | None]) -> bool:
    """Return True if the whole was rendered with the words of its messages in order.

    The words of each message must stand after those of the message before. The first answer is of
    the whole, each further one of the same with one message changed.
    """
    whole = answers[0]
    if whole is None:
        return False
    places: list[int] = []
    for other in answers[1:]:
        if other is None:
            return False
        at = next((n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), None)
        if at is None:
            return False
        places.append(at)
    return places == sorted(places) and len(set(places)) == len(places)
