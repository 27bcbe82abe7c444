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
from bridle.reconstruct.exports.conditions import OPEN
from bridle.reconstruct.kinds.kinds import classify
from bridle.reconstruct.rewards import turn_rewards
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallKind


def show(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    store: StoreOption,
    json: JsonOption = False,
) -> None:
    """Show a session's turns: lineage, tokens observed and sampled, breaks, rewards."""
    with reader(store) as source:
        record = one_session(source, session)
        (about,) = summaries(source, [record])
        turns = _turns(source, record.id)
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
    for name, value in about["rewards"].items():
        out.print(f"reward {name} = {value:g}")
    for turn in turns:
        for name, value in turn["rewards"].items():
            out.print(f"reward {name} = {value:g} (turn {turn['turn']})")


def _turns(source: Reader, session_id: str) -> list[dict[str, Any]]:
    calls = source.calls(session_id)
    verdicts = classify(calls)
    numbers = {call.id: number for number, call in enumerate(calls, start=1)}
    rewards = source.rewards(session_id)
    given = {reward.name: turn_rewards(rewards, reward.name) for reward in rewards}
    observed: dict[str, int] = {}
    for span in source.spans(session_id):
        if span.logprobs is None:
            observed[span.call_id] = observed.get(span.call_id, 0) + len(span.token_ids)
    return [
        {
            "turn": numbers[call.id],
            "call_id": call.id,
            "continues": numbers.get(call.parent_call_id or ""),
            "lineage_rule": call.lineage_rule,
            "dialect": call.dialect,
            "kind": verdicts[call.id].kind,
            "kind_evidence": verdicts[call.id].evidence,
            "status": call.status,
            "reason": call.reason,
            "prompt_tokens": call.prompt_tokens,
            "new_tokens": observed.get(call.id, 0),
            "sampled_tokens": call.sampled_tokens,
            "finish_reason": call.finish_reason,
            "policy_versions": [call.version_start, call.version_end],
            "break_reason": call.break_reason,
            "break_reasons": call.break_reasons,
            "constrained": call.constrained,
            "notes": [note.name for note in call.notes],
            "rewards": {name: of[call.id] for name, of in given.items() if call.id in of},
            "reply": call.replies[0].to_chat() if call.replies else {},
            "said": _said(call),
        }
        for call in calls
    ]


def _said(call: CallRow) -> str:
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
    said = turn["said"] or turn["reason"] or ""
    return [
        str(turn["turn"]),
        str(turn["continues"] or "–"),
        str(turn["new_tokens"]),
        str(turn["sampled_tokens"] if turn["sampled_tokens"] is not None else "–"),
        turn["finish_reason"] or "–",
        turn["status"],
        f"({'; '.join(remarks)}) {said}" if remarks else said,
    ]
