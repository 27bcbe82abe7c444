"""The effects of a chat template on a conversation, found by trying it on made-up ones.

:meth:`Prober.report` runs at start-up and is printed by ``bridle doctor``. :meth:`Prober.proven`
tests, for one shape of reply and tail, whether the tail rendered on its own is exactly the end of
the full rendering, in text and in token ids; each shape is tried once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.bare_tools import refuses_bare_tools
from bridle.proxy.continuation.efforts import refused_efforts
from bridle.proxy.continuation.report import TemplateReport, Thinking, in_words
from bridle.proxy.continuation.roles import QUESTIONS, TOOLS, Question, RoleRules, rules_from
from bridle.proxy.continuation.tail import SeamError, Setting, Shape, TailRenderer, shapes_for
from bridle.proxy.wire.canonical import Message, ToolCall

TOOL: Mapping[str, Any] = TOOLS[0]
SYSTEM = Message("system", "Answer briefly.")
THOUGHT = "PONDER the second page"
ODD_ARGUMENTS = '{"word":"caf\\u00e9",  "page":2}'
SHORT_ID, LONG_ID = "a1b2c3d4{}", "call_abcdefghijklmnopqrstuvwx0{}"


class _Objection(str):
    """The reason why tails of one kind do not render on their own."""

    __slots__ = ()


class Prober:
    """A tester of one tokenizer's template, which remembers its results."""

    def __init__(self, tokenizer: Tokenizer, tails: TailRenderer) -> None:
        self._tokenizer = tokenizer
        self._tails = tails
        self._proven: dict[tuple[object, ...], Shape | _Objection] = {}

    # — tails —

    def proven(self, reply: Message, tail: Sequence[Message], setting: Setting) -> Shape | None:
        """Return the shape of surrogate by which such a tail renders on its own after such a reply.

        Return ``None`` if no shape is proven.
        """
        found = self._tried(reply, tail, setting)
        return found if isinstance(found, Shape) else None

    def objection(self, reply: Message, tail: Sequence[Message], setting: Setting) -> str | None:
        """Return the reason why a tail like this cannot be rendered on its own.

        Return ``None`` if it can.
        """
        found = self._tried(reply, tail, setting)
        return None if isinstance(found, Shape) else str(found)

    def _tried(
        self, reply: Message, tail: Sequence[Message], setting: Setting
    ) -> Shape | _Objection:
        long_ids = any(len(call.id) != 9 for call in reply.tool_calls)
        shape = (
            _kind(reply), _roles(tail), bool(setting.head), bool(setting.tools), long_ids,
            orjson.dumps(setting.template_kwargs, option=orjson.OPT_SORT_KEYS),
        )  # fmt: skip
        if shape not in self._proven:
            plain = Setting(
                (SYSTEM,) if setting.head else (),
                (TOOL,) if setting.tools else (),
                setting.template_kwargs,
            )
            self._proven[shape] = self._ladder(_kind(reply), _roles(tail), plain, long_ids)
        return self._proven[shape]

    def _ladder(
        self, kind: str, roles: tuple[str, ...], setting: Setting, long_ids: bool
    ) -> Shape | _Objection:
        """Return the first proven shape of surrogate, else the objection to the most likely one."""
        objections = []
        for shape in shapes_for(_reply(kind, SHORT_ID)):
            found = self._try(kind, roles, setting, long_ids, shape)
            if found is None:
                return shape
            objections.append(_Objection(found))
        if kind.startswith("text+"):
            # Some templates write the text behind the results. The policy sampled it before its
            # calls, so what follows is what the template writes after the calls alone.
            calls = kind.removeprefix("text+")
            if self._try(calls, roles, setting, long_ids, Shape.WHOLE) is None:
                return Shape.CALLS
        return objections[0]

    def _try(
        self,
        kind: str,
        roles: tuple[str, ...],
        setting: Setting,
        long_ids: bool,
        shape: Shape,
    ) -> str | None:
        id_form = LONG_ID if long_ids else SHORT_ID
        objection: str | None = "the template refuses such a conversation"
        for history in _histories(id_form, bool(setting.tools)):
            reply = _reply(kind, id_form)
            new = _tail(roles, reply, id_form)
            try:
                whole = self._text((*history, reply, *new), setting)
            except TemplateError as error:
                objection = objection and f"{objection}: {error}"
                continue
            try:
                tail = self._tails.tail(reply, new, setting, shape)
            except (TemplateError, SeamError) as error:
                return str(error)
            if not whole.endswith(tail.end_text + tail.text):
                return "rendered alone, the new turns read differently than at the end of the whole"
            if any(word in whole and word not in tail.text for word in _words(new)):
                return "a new turn is written among the earlier ones"
            count = len(tail.token_ids)
            if self._tokenizer.encode(whole)[-count:] != tail.token_ids.tolist():
                return "tokenised alone, the new turns have other ids than at the end of the whole"
            objection = None
        return objection

    # — the report —

    def report(self) -> TemplateReport:
        """Try the template on every kind of conversation; this takes well under a second."""
        user, answer = Message("user", "What is a café?"), Message("assistant", "A house. ☕")
        usable = self._renders(user)
        system = self._says(str(SYSTEM.content), SYSTEM, user)
        bare = self._with_call("call", "tool", SHORT_ID)
        called = bare or self._with_call("text+call", "tool", SHORT_ID)
        rendered = called is not None
        tools = called is not None and self._shows_calls(called, 1)
        long_ids = self._with_call("text+call", "tool", LONG_ID) is not None
        both = self._with_call("text+calls" if bare is None else "calls", "tools", SHORT_ID)
        parallel = tools and both is not None and self._shows_calls(both, 2)
        beside = self._with_call("text+call", "tool", SHORT_ID)
        late_system = self._renders(user, answer, SYSTEM)
        alternation = usable and not self._renders(user, user)
        thinking = self._thinking(tools)
        failures = self._tail_failures(system, rendered, LONG_ID if long_ids else SHORT_ID)
        rewrites = self._rewrites(tools, thinking) if usable else ("nothing renders",)
        arguments = tools and self._arguments_reserialised()
        ends = self._end_ids(tools)
        report = TemplateReport(
            usable=usable,
            prefix_preserving=not rewrites,
            tails_local=usable and not failures,
            thinking=thinking,
            arguments_reserialised=arguments,
            system=system,
            late_system=late_system,
            alternation=alternation,
            tools=tools,
            calls_vanish=rendered and not tools,
            parallel_calls=parallel,
            text_beside_calls=tools and beside is not None and "Let me see" in beside,
            bare_calls=tools and bare is not None,
            ids_refused=rendered and not long_ids,
            end_of_turn_ids=ends,
            generation_prompt=self._generation_prompt() if usable else "",
            roles=self._roles() if usable else RoleRules(),
            refused_efforts=refused_efforts(self._tokenizer) if usable else (),
            bare_tools_refused=usable and refuses_bare_tools(self._tokenizer),
        )
        return replace(report, reasons=in_words(report, rewrites, failures))

    def _roles(self) -> RoleRules:
        return rules_from([self._answer(question) for question in QUESTIONS])

    def _answer(self, question: Question) -> str | None:
        try:
            return self._text(question.messages, Setting(tools=TOOLS if question.tools else ()))
        except TemplateError:
            return None

    def _with_call(self, kind: str, results: str, id_form: str) -> str | None:
        """Return a rendered conversation with a reply of that kind and its results.

        Return ``None`` if the template refuses it.
        """
        reply = _reply(kind, id_form)
        new = _tail((results,), reply, id_form)
        try:
            return self._text((Message("user", "Q?"), reply, *new), Setting(tools=(TOOL,)))
        except TemplateError:
            return None

    def _shows_calls(self, text: str, count: int) -> bool:
        """Return whether ``text`` has the names and arguments of the made-up calls, and results."""
        declared = self._text((Message("user", "Q?"),), Setting(tools=(TOOL,)))
        arguments = all(f"cup{n}" in text for n in range(count))
        results = all(f"found{n}:" in text for n in range(count))
        names = text.count("look_up") >= declared.count("look_up") + count
        return arguments and results and names

    def _tail_failures(self, system: bool, tools: bool, id_form: str) -> tuple[str, ...]:
        settings = [Setting()] + [Setting((SYSTEM,))] * system
        shapes: list[tuple[str, tuple[str, ...]]] = [("text", ("user",))]
        if tools:
            settings += [Setting(tools=(TOOL,))] + [Setting((SYSTEM,), (TOOL,))] * system
            shapes += [
                ("call", ("tool",)),
                ("calls", ("tools",)),
                ("text+call", ("tool",)),
                ("call", ("tool", "user")),
                ("call", ("tool", "call", "tool")),
            ]
        failures = []
        for setting in settings:
            for kind, roles in shapes:
                if kind != "text" and not setting.tools:
                    continue
                reply = _reply(kind, id_form)
                found = self.objection(reply, _tail(roles, reply, id_form), setting)
                if found is not None and "refuses such" not in found:
                    failures.append(f"after {kind}, {' then '.join(roles)}: {found}")
        return tuple(dict.fromkeys(failures))

    def _thinking(self, tools: bool) -> Thinking:
        user = Message("user", "What is a café?")
        answer = Message("assistant", "A house.", reasoning=THOUGHT)
        after_user = self._says(THOUGHT, user, answer, user)
        if tools:
            call = _reply("call", SHORT_ID, reasoning=THOUGHT)
            now = self._says(THOUGHT, user, call, *_tail(("tool",), call, SHORT_ID), tools=True)
        else:
            now = self._says(THOUGHT, user, answer, ends=True)
        if after_user:
            return "kept"
        if now:
            return "stripped after the next user turn"
        shown = self._says(THOUGHT, user, answer, ends=True)
        return "stripped" if shown else "not rendered"

    def _rewrites(self, tools: bool, thinking: Thinking) -> tuple[str, ...]:
        """Return the names of the replies that a growing conversation renders differently.

        The conversation rendered such a reply otherwise when the reply was last.
        """
        found = []
        thought = None if thinking == "not rendered" else THOUGHT
        cases: list[tuple[str, tuple[Message, ...]]] = [
            ("a reply", _growing(None)),
            ("a reply with reasoning", _growing(thought)),
        ]
        if tools:
            cases.append(("a tool call", _growing_with_tools(None)))
            cases.append(("a tool call with reasoning", _growing_with_tools(thought)))
        for name, conversation in cases:
            if self._rewritten(conversation, tools):
                found.append(name)
        return tuple(found)

    def _rewritten(self, conversation: Sequence[Message], tools: bool) -> bool:
        setting = Setting(tools=(TOOL,) if tools else ())
        for at, message in enumerate(conversation):
            if message.role != "assistant":
                continue
            try:
                asked = self._text(conversation[:at], setting)
                if not self._text(conversation, setting).startswith(asked.rstrip()):
                    return True
                last = self._text(conversation[: at + 1], setting, ends=True)
                later = self._text(conversation, setting)
            except TemplateError:
                continue
            if not any(later.startswith(turn) for turn in self._tails.ends_of(last)):
                return True
        return False

    def _arguments_reserialised(self) -> bool:
        call = Message(
            "assistant", tool_calls=(ToolCall(SHORT_ID.format(0), "look_up", ODD_ARGUMENTS),)
        )
        return not self._says(
            ODD_ARGUMENTS,
            Message("user", "?"), call, *_tail(("tool",), call, SHORT_ID), tools=True,
        )  # fmt: skip

    def _end_ids(self, tools: bool) -> frozenset[int]:
        ends = set()
        for kind in ("text", "call") if tools else ("text",):
            setting = Setting(tools=(TOOL,) if tools else ())
            try:
                closing = self._tails.closing(_reply(kind, SHORT_ID), setting)
            except SeamError:
                continue
            span = self._tails.end_of_turn(closing) if closing is not None else None
            if closing is not None and span is not None:
                ends.add(self._tokenizer.token_id(closing[span[0] : span[1]]))
        return frozenset(end for end in ends if end is not None)

    def _generation_prompt(self) -> str:
        user = Message("user", "What is a café?")
        without = self._text((user,), Setting(), ends=True)
        return self._text((user,), Setting()).removeprefix(without)

    def _says(self, text: str, *messages: Message, tools: bool = False, ends: bool = False) -> bool:
        try:
            return text in self._text(messages, Setting(tools=(TOOL,) if tools else ()), ends=ends)
        except TemplateError:
            return False

    def _renders(self, *messages: Message) -> bool:
        return self._says("", *messages)

    def _text(self, messages: Sequence[Message], setting: Setting, *, ends: bool = False) -> str:
        return self._tokenizer.render(
            [message.to_chat() for message in (*setting.head, *messages)],
            setting.tools or None,
            add_generation_prompt=not ends,
            **(setting.template_kwargs or {}),
        )


# — made-up conversations —


def _kind(reply: Message) -> str:
    if not reply.tool_calls:
        return "text"
    calls = "call" if len(reply.tool_calls) == 1 else "calls"
    return f"text+{calls}" if reply.content else calls


def _roles(tail: Sequence[Message]) -> tuple[str, ...]:
    """Return the roles of the tail in order; several tool results in a row become ``tools``."""
    roles: list[str] = []
    for message in tail:
        role = _kind(message) if message.role == "assistant" else message.role
        if role == "tool" and roles and roles[-1] in ("tool", "tools"):
            roles[-1] = "tools"
        else:
            roles.append(role)
    return tuple(roles)


def _reply(kind: str, id_form: str, *, reasoning: str | None = None, first: int = 0) -> Message:
    count = {"call": 1, "calls": 2}.get(kind.removeprefix("text+"), 0)
    return Message(
        "assistant",
        "Let me see — ☕." if kind.startswith("text") else None,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id_form.format(first + n), "look_up", f'{{"word": "café cup{n}"}}')
            for n in range(count)
        ),
    )


def _tail(roles: Sequence[str], reply: Message, id_form: str) -> tuple[Message, ...]:
    tail: list[Message] = []
    calls = reply.tool_calls
    for role in roles:
        if role in ("tool", "tools"):
            for n in range(2 if role == "tools" else 1):
                answered = calls[n].id if n < len(calls) else id_form.format(9)
                found = f"found{len(tail)}: 12 cafés\n"
                tail.append(Message("tool", found, tool_call_id=answered, name="look_up"))
        elif role == "user":
            tail.append(Message("user", f"say{len(tail)}  \n\nÇa va?"))
        elif role == "system":
            tail.append(Message("system", f"rule{len(tail)}: be brief."))
        else:
            tail.append(_reply(role, id_form, first=4))
            calls = tail[-1].tool_calls
    return tuple(tail)


def _words(tail: Sequence[Message]) -> list[str]:
    """Return a word of each new turn that stands in no other."""
    texts = (message.content for message in tail if isinstance(message.content, str))
    return [words[0].rstrip(":") for text in texts if (words := text.split())]


def _histories(id_form: str, tools: bool) -> list[tuple[Message, ...]]:
    """Return the conversations that may stand before the reply: a short and a longer one."""
    user = Message("user", "What is a café?")
    more: tuple[Message, ...] = (user, Message("assistant", "A house.", reasoning=THOUGHT))
    if tools:
        call = _reply("call", id_form, reasoning=THOUGHT, first=6)
        more = (user, call, *_tail(("tool",), call, id_form), more[1])
    return [(user,), (*more, Message("user", "And a second one?"))]


def _growing(thought: str | None) -> tuple[Message, ...]:
    user = Message("user", "What is a café?")
    answer = Message("assistant", "A house.", reasoning=thought)
    # Some templates know the last question by what it says: no two are the same.
    more, last = Message("user", "And a second one?"), Message("user", "And a third?")
    return (user, answer, more, answer, last)


def _growing_with_tools(thought: str | None) -> tuple[Message, ...]:
    user = Message("user", "What is a café?")
    call = _reply("call", SHORT_ID, reasoning=thought)
    result = _tail(("tool",), call, SHORT_ID)
    answer = Message("assistant", "A house.", reasoning=thought)
    return (user, call, *result, answer, Message("user", "And a second one?"))
