"""The ``bridle`` program: the name of every command, and how an error ends one.

Each command is a file in ``bridle/cli/commands`` that is imported when the command runs. Recording
therefore never loads torch, and ``bridle --help`` imports no command.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from keyword import iskeyword
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from bridle.cli.terminal import fail, out, print_warnings
from bridle.errors import BridleError
from bridle.threads import set_thread_defaults

_CLICK_USAGE_ERROR: Final[Any] = typer.BadParameter.__base__
"""The class of click's errors about usage. Typer brings its own click, and exports its subclass."""


class Entry(NamedTuple):
    """A command that is not imported yet."""

    module: str
    """The module with a function of the command's name (``_`` for ``-``, and a ``_`` behind a word
    of Python), or with a Typer ``app`` if the command has commands of its own. A ``CONTEXT`` in it
    holds the command's context settings."""
    summary: str
    """The first line of the command's own help."""


HELP_OPTIONS: Final = ["-h", "--help"]
_ROOM: Final = "bridle.cli.commands"

PANELS: Final[dict[str, dict[str, Entry]]] = {
    "Record and look": {
        "engine": Entry(f"{_ROOM}.engine", "Serve a policy."),
        "proxy": Entry(
            f"{_ROOM}.proxy", "Record every call of the agents whose base URL is this proxy."
        ),
        "run": Entry(f"{_ROOM}.run", "Run a command as one recorded session: bridle run -- codex."),
        "replay": Entry(
            f"{_ROOM}.replay", "Start a recorded agent anew, and go on live at one of its turns."
        ),
        "why": Entry(f"{_ROOM}.why", "Find the turn that lost a session, by re-entering it."),
        "sessions": Entry(f"{_ROOM}.sessions", "List recorded sessions."),
        "show": Entry(f"{_ROOM}.show", "Show a session's conversation, turn by turn."),
        "viewer": Entry(f"{_ROOM}.viewer", "Show sessions, tokens, trees and runs in a browser."),
        "export": Entry(
            f"{_ROOM}.export", "Write recorded sessions as training data, with a data card."
        ),
    },
    "Train": {
        "init": Entry(
            f"{_ROOM}.init",
            "Write an agent, tasks, a verifier and a run.toml to train with.",
        ),
        "rollout": Entry(
            f"{_ROOM}.rollout", "Run an agent on tasks; each session is verified and rewarded."
        ),
        "train": Entry(f"{_ROOM}.train", "Train a policy inside an agent; run again, it resumes."),
        "eval": Entry(
            f"{_ROOM}.eval", "Measure agents on tasks or recorded sessions (pass@k, mean@k)."
        ),
        "sft": Entry(f"{_ROOM}.sft", "Fine-tune a policy on recorded trajectories."),
        "demo": Entry(
            f"{_ROOM}.demo", "Train the model of a small LangChain agent, and plot its reward."
        ),
        "reproduce": Entry(f"{_ROOM}.reproduce", "Train a tiny policy inside a real coding agent."),
    },
    "Judge a record": {
        "doctor": Entry(
            f"{_ROOM}.doctor", "Examine template, engine and store, or explain a session or run."
        ),
        "audit": Entry(
            f"{_ROOM}.audit", "Print where sampled tokens went; exit with 1 unless they add up."
        ),
        "verify": Entry(
            f"{_ROOM}.verify", "Re-feed recorded ids to an engine and compare logprobs and texts."
        ),
        "top": Entry(f"{_ROOM}.top", "Show live what is recorded. Ctrl-C ends."),
        "reward": Entry(
            f"{_ROOM}.reward", "Add a named reward to a session, or to one turn or role of it."
        ),
    },
    "Store and setup": {
        "import": Entry(
            f"{_ROOM}.import_", "Record transcripts, JSONL or spans of other programs as sessions."
        ),
        "backup": Entry(
            f"{_ROOM}.copies", "Copy the store into one file, also while a proxy writes to it."
        ),
        "forget": Entry(
            f"{_ROOM}.forget", "Delete recorded sessions, with all that no other session uses."
        ),
        "examples": Entry(f"{_ROOM}.examples", "List the examples, or copy one into this folder."),
        "skill": Entry(
            f"{_ROOM}.skill",
            "Write a skill for coding agents, to use Bridle by themselves.",
        ),
        "config": Entry(
            f"{_ROOM}.config", "Print, as JSON, the settings in effect, without secrets."
        ),
        "status": Entry(
            f"{_ROOM}.status", "Show a running proxy's policy version, gate and engines."
        ),
    },
}
"""The commands by name, under the headings and in the order of ``bridle --help``."""

RARE: Final[dict[str, Entry]] = {
    "seal": Entry(f"{_ROOM}.seal", "End a session: it takes no more calls, and reaches the feed."),
    "kind": Entry(f"{_ROOM}.kind", "Set what a call was for; show, train and export follow it."),
    "ablate": Entry(f"{_ROOM}.ablate", "Compare the builders of samples on recorded sessions."),
    "export-db": Entry(
        f"{_ROOM}.copies", "Copy the store into another database, such as PostgreSQL."
    ),
    "import-db": Entry(
        f"{_ROOM}.copies", "Copy another database into the store, which must be empty."
    ),
    "plan": Entry(f"{_ROOM}.plan", "Estimate the hardware for a number of sessions per hour."),
    "harness": Entry(f"{_ROOM}.harness", "Harnesses as layers that containers mount."),
    "tasks": Entry(f"{_ROOM}.tasks", "Tasks of other forms, as Harbor folders."),
}
"""The commands that few people need. ``bridle --help`` names them in one line."""

if find_spec("bridle.bench") is not None:  # a checkout: the benchmarks are not installed
    RARE["bench"] = Entry("bridle.bench.commands", "Measure.")

COMMANDS: Final = {
    name: entry for panel in (*PANELS.values(), RARE) for name, entry in panel.items()
}
"""The commands by name."""


class Commands(TyperGroup):
    """The command group, which imports a command when it is called.

    Errors that a user can act on end a command with one line: Bridle's own, and those of files,
    folders and disks.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in COMMANDS:
            self.add_command(TyperCommand(name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings, a line for each."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for heading, panel in PANELS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, entry.summary) for name, entry in panel.items()])
        with formatter.section("Rarely needed (bridle NAME --help)"):
            formatter.write_text(", ".join(RARE))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        set_thread_defaults(name or "")
        return name, as_written(loaded(name)) if name in COMMANDS else command, rest

    def invoke(self, ctx: Any) -> Any:
        print_warnings()
        try:
            return super().invoke(ctx)
        except _CLICK_USAGE_ERROR as error:
            from bridle.cli.settings import replacements

            if not (instead := replacements(error)):
                raise
            fail(f"there is no option {error.option_name}: use {' or '.join(instead)}", 2)
        except BridleError as error:
            fail("; ".join((str(error), *getattr(error, "__notes__", ()))), error.exit_code)
        except ConnectionError:  # includes a closed pipe, which click ends quietly
            raise
        except OSError as error:
            if error.errno is None:
                raise
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def loaded(name: str) -> Any:
    """Import the command ``name``, and return it with its options."""
    module = import_module(COMMANDS[name].module)
    if (group := getattr(module, "app", None)) is not None:
        return typer.main.get_group(group)
    one = typer.Typer(add_completion=False)
    settings = getattr(module, "CONTEXT", None)
    function = getattr(module, name.replace("-", "_") + "_" * iskeyword(name))
    one.command(name, context_settings=settings)(function)
    return typer.main.get_command(one)


def as_written(command: Any) -> Any:
    """Return ``command`` with help texts that print as they are written, and flags without a type.

    Those of its sub-commands are included.

    Typer prints help as Rich markup, which drops words in brackets.
    """
    # The command keeps this option, which is not among its parameters.
    flag = command.get_help_option(command.context_class(command, help_option_names=HELP_OPTIONS))
    for part in (command, flag, *command.params):
        if getattr(part, "help", None):
            part.help = escape(part.help)
        if getattr(part, "is_bool_flag", False):
            part.metavar = ""
    for each in getattr(command, "commands", {}).values():
        as_written(each)
    return command


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"bridle {metadata.version('bridle-rl')}")
        raise typer.Exit


app = typer.Typer(
    name="bridle",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": HELP_OPTIONS},
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
