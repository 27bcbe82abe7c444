"""The ``bridle`` program: the name of every command, and how an error ends one.

Each command is a file in ``bridle/cli/commands`` that imports what it needs when it runs, so that
recording never loads torch and ``bridle --help`` is fast.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bridle.cli.commands import (
    ablate,
    audit,
    copies,
    demo,
    doctor,
    engine,
    export,
    forget,
    harness,
    kind,
    proxy,
    reproduce,
    reward,
    rollout,
    run,
    samples,
    sessions,
    sft,
    show,
    status,
    tasks,
    train,
    trainer,
    viewer,
)
from bridle.cli.terminal import fail, out
from bridle.errors import BridleError


class Commands(TyperGroup):
    """Ends a command with one line for each error that a user can act on: Bridle's own, and those
    of files, folders and disks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BridleError as error:
            fail("; ".join((str(error), *getattr(error, "__notes__", ()))), error.exit_code)
        except ConnectionError:  # includes a closed pipe, which click ends quietly
            raise
        except OSError as error:
            if error.errno is None:
                raise
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"bridle {metadata.version('bridle-rl')}", highlight=False)
        raise typer.Exit


app = typer.Typer(
    name="bridle",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bridle(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train the model inside an agent you did not write."""


app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("reproduce")(reproduce.reproduce)
app.command("proxy")(proxy.proxy)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("sessions")(sessions.sessions)
app.command("viewer")(viewer.viewer)
app.command("status")(status.status)
app.command("show")(show.show)
app.command("reward", context_settings=reward.CONTEXT)(reward.reward)
app.command("kind")(kind.kind)
app.command("samples")(samples.samples)
app.command("export")(export.export)
app.command("audit")(audit.audit)
app.command("ablate")(ablate.ablate)
app.command("forget")(forget.forget)
app.command("backup")(copies.backup)
app.command("export-db")(copies.export_db)
app.command("import-db")(copies.import_db)
app.command("rollout")(rollout.rollout)
app.command("train")(train.train)
app.command("trainer")(trainer.trainer)
app.command("sft")(sft.sft)
app.add_typer(engine.app, name="engine")
app.add_typer(harness.app, name="harness")
app.add_typer(tasks.app, name="tasks")
if find_spec("bridle.bench") is not None:  # a checkout: the benchmarks are not installed
    from bridle.bench import commands as bench

    app.add_typer(bench.app, name="bench")
