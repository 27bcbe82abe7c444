"""``bridle show``: print a session's whole conversation, turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.text import Text

from bridle.cli.commands.sessions import summaries
from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader, require_turn
from bridle.cli.terminal import counted, fail, out, paged, print_json, print_table
from bridle.diagnosis.notes import sentence
from bridle.diagnosis.transcript import ShownMessage, Turn, lasted, turns_of
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow
from bridle.store.reading.session_filter import OPEN
from bridle.store.records import IMPORTED, CallKind, CallStatus, SpanKind

_STYLES = {
    CallStatus.COMPLETE: "green",
    CallStatus.OPEN: "cyan",
    CallStatus.PARTIAL: "yellow",
}
"""The style of each status; any other status is red."""
_BEGINNING = 80
"""The characters that are shown of a long system prompt."""
_ROLES = {"user": "bold cyan", "assistant": "bold green", "tool": "bold magenta"}


def show(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    store: StoreOption,
    turn: Annotated[int | None, typer.Option(help="Only this turn.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Only what was said, without figures.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Long system prompts whole; else their beginning.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="A line for each turn.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a session's conversation, turn by turn.

    Each turn has its messages, model, time and tokens, and its break if there is one.
    """
    if table and text:
        fail("--table and --text exclude each other", 2)
    with reader(store) as source:
        record = one_session(source, session)
        (about,) = summaries(source, [record])
        loaded = LoadedSession.load(source, record.id)
    if turn is not None:
        require_turn(record.id, turn, len(loaded.calls))
    chosen = slice(None) if turn is None else slice(turn - 1, turn)
    turns = turns_of(loaded)[chosen]
    rows = [] if text else _rows(loaded)[chosen]
    if json and not text:
        print_json({**about, "continuation": record.continuation, "turns": rows})
        return
    with paged():
        if text:
            for one in turns:
                _print_messages(one, full)
            return
        if turn is None:
            _print_head(about, loaded)
        if table:
            _print_table(rows)
        else:
            _print_turns(turns, rows, full)
        if turn is None:
            _print_totals(about, record.continuation, rows, loaded.calls)
        elif not table:
            _print_rewards(rows)


def _print_head(about: dict[str, Any], loaded: LoadedSession) -> None:
    name = f"  ({about['name']})" if about["name"] else ""
    out.print(Text.assemble((about["id"], "bold"), name))
    out.print(
        f"{about['harness'] or 'unknown harness'} · {about['outcome'] or OPEN} · "
        f"{counted(about['calls'], 'call')} · {about['observed_tokens']} tokens observed, "
        f"{about['sampled_tokens']} sampled"
    )
    for damage in loaded.damage:
        out.print(Text(damage.detail, style="bold red"))


def _print_turns(turns: Sequence[Turn], rows: Sequence[dict[str, Any]], full: bool) -> None:
    for turn, row in zip(turns, rows, strict=True):
        _print_turn(turn, row, full)


def _print_turn(turn: Turn, row: dict[str, Any], full: bool) -> None:
    call = turn.call
    out.print()
    status = (str(call.status), _STYLES.get(call.status, "bold red"))
    title = Text.assemble((f"turn {turn.number}", "bold"), "  ", status)
    for part in _figures(turn, row):
        title.append(f" · {part}", style="dim")
    out.print(title)
    _print_messages(turn, full)
    if turn.running:
        out.print(Text("  running…", style="cyan"))
    if call.reason:
        out.print(Text(f"  {call.reason}", style="bold red"))
    if call.break_reasons:
        reasons = ", ".join(call.break_reasons)
        out.print(
            Text(f"  break: its tokens do not continue turn {turn.continues}: {reasons}", "yellow")
        )
    for reason, tokens in turn.excluded.items():
        out.print(Text(f"  {counted(tokens, 'token')} not trainable: {reason}", style="yellow"))
    if call.status is CallStatus.COMPLETE and not call.sampled_tokens:
        imported = any(note.name == IMPORTED for note in call.notes)
        why = "the imported file has" if imported else "the engine returned"
        out.print(Text(f"  {why} no token ids: nothing to train", style="yellow"))


def _figures(turn: Turn, row: dict[str, Any]) -> list[str]:
    call = turn.call
    parts = [call.model_served or call.model_requested, lasted(turn.seconds)]
    if turn.first_token is not None:
        parts.append(f"{lasted(turn.first_token)} to the first token")
    if call.prompt_tokens is not None:
        parts.append(f"{call.prompt_tokens} + {call.sampled_tokens or 0} tokens")
    if call.finish_reason:
        parts.append(str(call.finish_reason))
    if turn.continues is not None and turn.continues != turn.number - 1:
        parts.append(f"after turn {turn.continues}")
    return parts + _remarks(row)


def _print_messages(turn: Turn, full: bool) -> None:
    for message in turn.asked:
        _print_message(message, message.role, full)
    for message in turn.replies:
        label = "assistant" if len(turn.replies) == 1 else f"assistant, choice {message.choice}"
        _print_message(message, label, full)


def _print_message(message: ShownMessage, label: str, full: bool) -> None:
    named = f"{label} {message.tool_call_id}" if message.tool_call_id else label
    out.print(Text(named, style=_ROLES.get(message.role, "bold")))
    parts = []
    if message.reasoning:
        parts.append(Text("  thinking", style="dim"))
        parts.append(Text(indent(_indented(message.reasoning), "  "), style="italic dim"))
    if message.folded and not full:
        beginning = " ".join(message.text.split())[:_BEGINNING]
        length = len(message.text)
        parts.append(Text(f"  {beginning}… ({length:,} characters; --full shows all)", "dim"))
    elif message.text.strip():
        parts.append(Text(_indented(message.text)))
    for call in message.tool_calls:
        parts.append(Text.assemble((f"  {call.name}", "bold yellow"), f" {call.arguments}"))
    for part in parts or [Text("  (empty)", style="dim")]:
        out.print(part)


def _indented(text: str) -> str:
    return indent(text.strip("\n"), "  ")


def _print_totals(
    about: dict[str, Any],
    mode: str | None,
    rows: Sequence[dict[str, Any]],
    calls: Sequence[CallRow],
) -> None:
    breaks = Counter(reason for row in rows for reason in row["break_reasons"])
    if breaks:
        each = ", ".join(f"{count} {reason}" for reason, count in breaks.most_common())
        out.print(f"breaks on ({mode} mode): {each}")
    noted = Counter(sentence(note) for call in calls for note in call.notes)
    for text, count in noted.most_common():
        out.print(Text(f"noted in {counted(count, 'call')}: {text}"))
    for name, value in about["rewards"].items():
        out.print(f"reward {name} = {value:g}")
    for role, named in about["role_rewards"].items():
        for name, value in named.items():
            out.print(f"reward {name} = {value:g} (role {role})")
    for name, found in about["findings"].items():
        at = ", ".join(map(str, found.get("turns", ())))
        where = f" in turns {at}" if at else ""
        shown = f": {found['example']}" if "example" in found else ""
        out.print(f"finding {name} ({found['mode']}){where}{shown}")
    _print_rewards(rows)


def _print_rewards(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        for name, value in row["rewards"].items():
            out.print(f"reward {name} = {value:g} (turn {row['turn']})")


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    numbers = ("turn", "after", "new", "sampled")
    print_table(
        (*numbers, "finish", "status", "reply"),
        [_cells(row) for row in rows],
        shrinks="reply",
        right=numbers,
    )


def _rows(session: LoadedSession) -> list[dict[str, Any]]:
    numbers = {call_id: number for number, call_id in enumerate(session.by_id, start=1)}
    names = {one.name for one in session.all_rewards if one.is_score}
    rewards = {name: session.turn_rewards(name) for name in sorted(names)}
    observed: Counter[str] = Counter()
    for row in session.spans:
        if row.span.kind is SpanKind.OBSERVED:
            observed[row.span.call_id] += len(row.span.token_ids)
    return [
        {
            "turn": numbers[call.id],
            "call_id": call.id,
            "continues": numbers.get(call.parent_call_id or ""),
            "lineage_rule": call.lineage_rule,
            "dialect": call.dialect,
            "kind": call.kind,
            "kind_evidence": session.verdicts[call.id].evidence,
            "status": call.status,
            "reason": call.reason,
            "model": call.model_served or call.model_requested,
            "seconds": None if call.ended_at is None else call.ended_at - call.started_at,
            "prompt_tokens": call.prompt_tokens,
            "new_tokens": observed[call.id],
            "sampled_tokens": call.sampled_tokens,
            "finish_reason": call.finish_reason,
            "policy_versions": [call.version_start, call.version_end],
            "break_reason": call.break_reason,
            "break_reasons": call.break_reasons,
            "constrained": call.constrained,
            "notes": [note.name for note in call.notes],
            "rewards": {name: of[call.id] for name, of in rewards.items() if call.id in of},
            "reply": call.replies[0].to_chat() if call.replies else {},
            "said": _one_line(call),
        }
        for call in session.calls
    ]


def _one_line(call: CallRow) -> str:
    """Return the reply as one line: its text, then its tool calls."""
    if not call.replies:
        return ""
    reply = call.replies[0]
    parts = [str(reply.content or "").strip()]
    parts += [f"{tool_call.name}({tool_call.arguments})" for tool_call in reply.tool_calls]
    return " ".join(" ".join(part.split()) for part in parts if part)


def _remarks(row: dict[str, Any]) -> list[str]:
    remarks = [row["kind"]] if row["kind"] not in (CallKind.MAIN, CallKind.UNKNOWN) else []
    return [*remarks, "constrained"] if row["constrained"] else remarks


def _cells(row: dict[str, Any]) -> list[str]:
    remarks = _remarks(row)
    if row["break_reasons"]:
        remarks.append(f"break: {', '.join(row['break_reasons'])}")
    text = row["said"] or row["reason"] or ""
    return [
        str(row["turn"]),
        str(row["continues"] or "–"),
        str(row["new_tokens"]),
        str(row["sampled_tokens"] if row["sampled_tokens"] is not None else "–"),
        row["finish_reason"] or "–",
        row["status"],
        f"({'; '.join(remarks)}) {text}" if remarks else text,
    ]
