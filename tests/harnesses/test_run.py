"""``bridle run -- CMD``: the command cannot tell, and its caller cannot either."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.client import Client, Session, SessionRequest
from bridle.harnesses.run import run_command, seal_session, session_variables
from bridle.harnesses.sandboxes import NotLaunchable

ROOT = Path(__file__).parents[2]
WRAPPER = (
    "import sys; from bridle.harnesses.run import run_command; "
    "sys.exit(run_command(sys.argv[1:], {'OPENAI_API_KEY': 'session'}))"
)


def wrapped(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    """A process that wraps ``argv``, as the command line does."""
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", WRAPPER, *argv],
        env=environment,
        stdin=options.pop("stdin", subprocess.PIPE),
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        **options,
    )


def test_input_and_output_pass_through_byte_for_byte() -> None:
    data = bytes(range(256)) * 1000
    process = wrapped("sh", "-c", "cat; echo err >&2; exit 5")

    out, err = process.communicate(data, timeout=20)

    assert (out, err, process.returncode) == (data, b"err\n", 5)


def test_a_command_killed_by_a_signal_gives_128_plus_it() -> None:
    assert run_command(["sh", "-c", "kill -KILL $$"], {}) == 137


def test_a_missing_command_is_said_plainly() -> None:
    with pytest.raises(NotLaunchable, match="cannot start no-such-command"):
        run_command(["no-such-command"], {})


def test_the_commands_environment_points_at_the_session_only() -> None:
    process = wrapped(
        "sh",
        "-c",
        'echo "$OPENAI_API_KEY|$ANTHROPIC_API_KEY|$GITHUB_TOKEN"',
        env={"OPENAI_API_KEY": "own", "ANTHROPIC_API_KEY": "own", "GITHUB_TOKEN": "own"},
    )

    out, _ = process.communicate(timeout=20)

    assert out == b"session||own\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command_and_its_answer_to_them_counts(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 9' {name}; echo up; while :; do sleep 0.02; done"
    # A group of its own, so that no terminal of ours is involved.
    process = wrapped("sh", "-c", script, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"

    process.send_signal(number)

    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"got {name}\n".encode(), 9)


def test_a_signal_that_ends_the_command_ends_the_wrapper_with_128_plus_it() -> None:
    process = wrapped("sh", "-c", "echo up; exec sleep 60", start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)

    assert process.returncode == 128 + signal.SIGTERM


def test_ctrl_c_at_the_terminal_reaches_the_command_once() -> None:
    script = (
        "import signal, sys, time\n"
        "count = 0\n"
        "def more(*_):\n"
        "    global count\n"
        "    count += 1\n"
        "signal.signal(signal.SIGINT, more)\n"
        "print('tty', sys.stdin.isatty(), flush=True)\n"
        "while not count: time.sleep(0.02)\n"
        "time.sleep(0.5)\n"
        "print('interrupts', count, 'count them', flush=True)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        argv = [sys.executable, "-c", WRAPPER, sys.executable, "-c", script]
        os.execv(sys.executable, argv)  # noqa: S606
    seen = read_until(terminal, b"tty True")
    os.write(terminal, b"\x03")
    seen += read_until(terminal, b"count them")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)

    assert b"interrupts 1" in seen
    assert os.waitstatus_to_exitcode(status) == 0


def read_until(terminal: int, text: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 20
    while text not in seen and time.monotonic() < deadline:
        try:
            seen += os.read(terminal, 1024)
        except OSError:  # the other end is closed
            break
    return seen


def test_a_command_gets_the_proxys_variables_and_codex_its_key() -> None:
    given = {"OPENAI_BASE_URL": "http://p/s/1/v1", "OPENAI_API_KEY": "key", "CO_API_KEY": "key"}
    session = Session("ses_1", "key", {}, given)
    assert session_variables(session) == given | {"CODEX_API_KEY": "key"}


async def test_a_session_is_sealed_by_the_commands_exit_code(stand_in: Any) -> None:
    async with Client(stand_in.url) as client:
        first = await client.create_session(SessionRequest())
        second = await client.create_session(SessionRequest())
        assert await seal_session(client, first, 0) == ""
        assert await seal_session(client, second, 130) == ""
        assert stand_in.sealed == {"ses_0": "completed", "ses_1": "agent_error"}

        stand_in.failing = 1
        assert "503" in await seal_session(client, first, 0)
