"""``bridle show``: one session, turn by turn."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.text import Text

from bridle.cli.commands.sessions import summaries
from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import out, print_json, print_table
from bridle.reconstruct.conditions import OPEN
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow
from bridle.store.records import CallKind, SpanKind


def show(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    store: StoreOption,
    json: JsonOption = False,
) -> None:
    """Show a session's turns: lineage, tokens observed and sampled, breaks, rewards."""
    with reader(store) as source:
        record = one_session(source, session)
        (about,) = summaries(source, [record])
        turns = _turns(LoadedSession.load(source, record.id))
    if json:
        print_json({**about, "continuation": record.continuation, "turns": turns})
        return
    out.print(Text.assemble((record.id, "bold"), f"  ({record.name})" if record.name else ""))
    out.print(
        f"{about['harness'] or 'unknown harness'} · {about['outcome'] or OPEN} · "
        f"{about['calls']} calls · {about['observed_tokens']} tokens observed, "
        f"{about['sampled_tokens']} sampled"
    )
    numbers = ("turn", "after", "new", "sampled")
    print_table(
        (*numbers, "finish", "status", "reply"),
        [_cells(turn) for turn in turns],
        shrinks="reply",
        right=numbers,
    )
    breaks = Counter(reason for turn in turns for reason in turn["break_reasons"])
    if breaks:
        counted = ", ".join(f"{count} {reason}" for reason, count in breaks.most_common())
        out.print(f"breaks on ({record.continuation} mode): {counted}", highlight=False)
    noted = Counter(name for turn in turns for name in turn["notes"])
    if noted:
        counted = ", ".join(f"{count} {name}" for name, count in noted.most_common())
        out.print(f"noted: {counted}", highlight=False)
    for name, value in about["rewards"].items():
        out.print(f"reward {name} = {value:g}")
    for turn in turns:
        for name, value in turn["rewards"].items():
            out.print(f"reward {name} = {value:g} (turn {turn['turn']})")


def _turns(session: LoadedSession) -> list[dict[str, Any]]:
    numbers = {call_id: number for number, call_id in enumerate(session.by_id, start=1)}
    rewards = {reward.name: session.turn_rewards(reward.name) for reward in session.all_rewards}
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
    """The reply on one line: its text, then its tool calls."""
    if not call.replies:
        return ""
    reply = call.replies[0]
    parts = [str(reply.content or "").strip()]
    parts += [f"{tool_call.name}({tool_call.arguments})" for tool_call in reply.tool_calls]
    return " ".join(" ".join(part.split()) for part in parts if part)


def _cells(turn: dict[str, Any]) -> list[str]:
    remarks = [turn["kind"]] if turn["kind"] not in (CallKind.MAIN, CallKind.UNKNOWN) else []
    if turn["constrained"]:
        remarks.append("constrained")
    if turn["break_reasons"]:
        remarks.append(f"break: {', '.join(turn['break_reasons'])}")
    text = turn["said"] or turn["reason"] or ""
    return [
        str(turn["turn"]),
        str(turn["continues"] or "–"),
        str(turn["new_tokens"]),
        str(turn["sampled_tokens"] if turn["sampled_tokens"] is not None else "–"),
        turn["finish_reason"] or "–",
        turn["status"],
        f"({'; '.join(remarks)}) {text}" if remarks else text,
    ]
