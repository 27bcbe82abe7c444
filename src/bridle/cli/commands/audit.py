"""``bridle audit``: check that every sampled token is accounted for and the store is consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text

from bridle.cli.options import JsonOption, RunOption, StoreOption
from bridle.cli.reading import nothing_found, one_session, reader, require_run
from bridle.cli.rules import RulesOption, sample_rules
from bridle.cli.terminal import counted, err, out, plain_table, print_json
from bridle.reconstruct.accounts import account_lines
from bridle.reconstruct.audit import SamplerTokens, SessionAudit, audit_session
from bridle.reconstruct.audit_batches import BatchedAudit
from bridle.store.reading.run_states import run_state
from bridle.store.schema.accounts import Fate
from bridle.threads import usable_cores


def audit(
    store: StoreOption,
    session: Annotated[str | None, typer.Argument(help="Only this session.")] = None,
    run: RunOption = None,
    bodies: Annotated[bool, typer.Option(help="Verify every recorded body as well.")] = False,
    rules: RulesOption = "",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the sessions. Default: cores.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print where sampled tokens went; exit with 1 unless they add up.

    Tokens that no training run has taken are judged by --rules. By default these are the rules of
    the session's run, and what they decide is stored for SQL and the pages where it is missing.
    """
    chosen = sample_rules(rules) if rules else None
    with reader(store) as source:
        require_run(source, run)
        total = _Total()
        if session is not None:
            found = one_session(source, session).id
            total.add(audit_session(source, found, chosen, bodies=bodies))
        else:
            batched = BatchedAudit(source, run, chosen, bodies)
            for audited in _followed(batched, processes or usable_cores()):
                total.add(audited)
        none = None if total.sessions else nothing_found(source)
        state = None if run is None else run_state(source, source.run(run))
    if json:
        print_json(total.as_data())
    else:
        if state is not None and state.lost:
            out.print(f"run {run}: {state.text}")
        if none is not None:
            out.print(f"{none.capitalize()}.")
        else:
            total.print()
    if total.violations:
        raise typer.Exit(1)


def _followed(batched: BatchedAudit, processes: int) -> Iterator[SessionAudit]:
    """Yield the audits of all sessions, and show on a terminal how many are done."""
    ids = batched.session_ids()
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        yield from progress.track(
            batched.results(ids, processes), total=len(ids), description="Auditing sessions"
        )


class _Total:
    """The token account, summed over all audited sessions."""

    def __init__(self) -> None:
        self.sessions = 0
        self.judged = 0
        self.unlinked = 0
        self.calls: Counter[str] = Counter()
        self.fates: Counter[Fate] = Counter()
        self.samplers: dict[str, SamplerTokens] = {}
        self.violations: list[dict[str, str]] = []

    def add(self, audited: SessionAudit) -> None:
        self.sessions += 1
        self.judged += audited.judged
        self.unlinked += audited.unlinked_roots
        self.calls.update({str(status): count for status, count in audited.calls.items()})
        self.fates.update(audited.fates)
        for label, tokens in audited.samplers.items():
            self.samplers[label] = self.samplers.get(label, SamplerTokens()) + tokens
        self.violations += [
            {"session": v.session_id, "rule": v.rule, "subject": v.subject, "detail": v.detail}
            for v in audited.violations
        ]

    @property
    def captured(self) -> int:
        return self.fates.total()

    def as_data(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "judged": self.judged,
            "unlinked_roots": self.unlinked,
            "calls": dict(self.calls),
            "captured": self.captured,
            **{fate: self.fates[Fate(fate)] for fate in ("trained", "trainable")},
            **{fate: self._reasons(fate) for fate in ("masked", "dropped")},
            "samplers": {label: asdict(tokens) for label, tokens in self.samplers.items()},
            "violations": self.violations,
        }

    def _reasons(self, fate: str) -> dict[str, int]:
        return {one.reason: n for one, n in self.fates.items() if one.fate == fate}

    def print(self) -> None:
        table = plain_table("sampled tokens", "")
        table.add_row("captured", str(self.captured))
        for line in account_lines(self.fates):
            table.add_row(line.label, str(line.tokens))
        calls = ", ".join(f"{count} {status}" for status, count in sorted(self.calls.items()))
        out.print(f"{counted(self.sessions, 'session')}; calls: {calls or 'none'}")
        out.print(table)
        drawn = plain_table("drawn at", "captured", "trainable")
        for label, tokens in sorted(self.samplers.items()):
            drawn.add_row(label, str(tokens.captured), str(tokens.trainable))
        if self.samplers:
            out.print(drawn)
        for violation in self.violations:
            where = " {session} {subject}: {detail}".format(**violation)
            out.print(Text.assemble((violation["rule"], "bold red"), where))
        if self.judged:
            out.print(f"Stored the judgement of {counted(self.judged, 'session')}.")
        if self.unlinked:
            out.print(
                f"{counted(self.unlinked, 'call')} continue no other though the session has "
                "another conversation: `bridle doctor SESSION` says more."
            )
        if not self.violations:
            self._print_verdict()

    def _print_verdict(self) -> None:
        """Print that the account is clean, or why nothing was captured."""
        if self.captured:
            out.print("Every token is accounted for.")
        elif self.calls["complete"]:
            out.print(
                "Nothing was captured: the engine returned no token ids. Texts can be exported; "
                "`bridle doctor last` says what to do."
            )
        else:
            out.print("Nothing was captured: no call was answered.")
