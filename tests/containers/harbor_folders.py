"""Twenty Harbor tasks made by rule, one for each thing that the format can ask for.

Each asks for one line in one file. ``solution/solve.sh`` writes it; the tests read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\n"
CLOSED = '[environment]\nnetwork_mode = "no-network"\n'


def judging(file: str, line: str, then: str = "") -> str:
    """Bash that writes 1 or 0 to the reward file."""
    return (
        "#!/bin/bash\n"
        f"if [ \"$(cat {file} 2>/dev/null)\" = '{line}' ]; then reward=1; else reward=0; fi\n"
        f"{then or 'echo $reward > /logs/verifier/reward.txt'}\n"
    )


def folder(
    root: Path,
    name: str,
    *,
    config: str = CLOSED,
    line: str | None = None,
    file: str = "/app/out.txt",
    files: Mapping[str, str | None] | None = None,
) -> None:
    """Writes a task; ``files`` replace its usual ones, ``None`` leaves one out."""
    line = line or f"line of {name}"
    written: dict[str, str | None] = {
        "task.toml": f'schema_version = "1.4"\n{config}',
        "instruction.md": f"<!-- canary {name} -->\n\nWrite '{line}' into {file}.\n",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": f"echo '{line}' > {file}\n",
        "tests/test.sh": judging(file, line),
        **(files or {}),
    }
    for path, text in written.items():
        if text is not None:
            target = root / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def step(file: str, line: str) -> dict[str, str]:
    return {
        "instruction.md": f"Write '{line}' into {file}.\n",
        "solution/solve.sh": f"echo '{line}' > {file}\n",
        "tests/test.sh": judging(file, line),
    }


def steps(**named: Mapping[str, str]) -> dict[str, str | None]:
    """Files of a task with steps and nothing of its own."""
    own: dict[str, str | None] = dict.fromkeys(
        ("instruction.md", "solution/solve.sh", "tests/test.sh")
    )
    for name, files in named.items():
        own |= {f"steps/{name}/{path}": text for path, text in files.items()}
    return own


def write_all(root: Path) -> None:
    """Writes the twenty tasks into ``root``."""
    folder(root, "plain")
    folder(
        root,
        "exit-code-ignored",
        files={
            "tests/test.sh": judging("/app/out.txt", "line of exit-code-ignored") + "exit 7\n",
        },
    )
    folder(
        root,
        "rewards-by-name",
        files={
            "tests/test.sh": judging(
                "/app/out.txt",
                "line of rewards-by-name",
                'echo "{\\"reward\\": $reward, \\"style\\": 0.5}" > /logs/verifier/reward.json',
            ),
        },
    )
    folder(
        root,
        "json-before-text",
        files={
            "tests/test.sh": judging(
                "/app/out.txt",
                "line of json-before-text",
                'echo 7 > /logs/verifier/reward.txt; echo "{\\"reward\\": $reward}" '
                "> /logs/verifier/reward.json",
            ),
        },
    )
    folder(
        root,
        "image-by-name",
        config=CLOSED + 'docker_image = "python:3.11-slim"\nworkdir = "/srv"\n',
        file="/srv/out.txt",
        files={"environment/Dockerfile": None},
    )
    folder(
        root,
        "agent-user",
        config=CLOSED + '[agent]\nuser = "worker"\n',
        files={
            "environment/Dockerfile": DOCKERFILE + "RUN useradd -m worker && chown worker /app\n",
            "tests/test.sh": judging(
                "/app/out.txt",
                "line of agent-user",
                '[ "$(stat -c %U /app/out.txt)" = worker ] || reward=0\n'
                "echo $reward > /logs/verifier/reward.txt",
            ),
        },
    )
    folder(
        root,
        "verifier-user",
        config=CLOSED + '[verifier]\nuser = "judge"\n',
        files={
            "environment/Dockerfile": DOCKERFILE + "RUN useradd -m judge\n",
            "tests/test.sh": judging(
                "/app/out.txt",
                "line of verifier-user",
                '[ "$(id -un)" = judge ] || reward=0\necho $reward > /logs/verifier/reward.txt',
            ),
        },
    )
    folder(
        root,
        "image-user",
        files={
            "environment/Dockerfile": DOCKERFILE
            + "RUN useradd -m worker && chown worker /app\nUSER worker\n",
        },
    )
    folder(
        root,
        "environment-variables",
        config=CLOSED + 'env = { TASK_LINE = "${NOT_SET_HERE:-by default}" }\n'
        '[verifier]\nenv = { WANTED = "by default" }\n',
        files={
            "solution/solve.sh": 'echo "$TASK_LINE" > /app/out.txt\n',
            "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/out.txt 2>/dev/null)" = "$WANTED" ] && '
            "reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n",
        },
    )
    folder(
        root,
        "solution-variables",
        config=CLOSED + '[solution]\nenv = { LINE = "from the solution" }\n',
        line="from the solution",
        files={"solution/solve.sh": 'echo "$LINE" > /app/out.txt\n'},
    )
    folder(
        root,
        "health-check",
        config=CLOSED + '[environment.healthcheck]\ncommand = "test -d /app"\ninterval_sec = 0.1\n',
    )
    folder(root, "limits", config=CLOSED + "cpus = 1\nmemory_mb = 512\nstorage_mb = 512\n")
    folder(root, "limits-as-text", config=CLOSED + 'memory = "1G"\nstorage = "1G"\n')
    folder(root, "internet-denied-as-before", config="[environment]\nallow_internet = false\n")
    folder(
        root,
        "pytest",
        files={
            "tests/test.sh": "#!/bin/bash\ncd /tests\npython3 -m unittest -q test_outputs && "
            "echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
            "tests/test_outputs.py": "import pathlib, unittest\n\n\n"
            "class Outputs(unittest.TestCase):\n    def test_line(self):\n"
            "        text = pathlib.Path('/app/out.txt').read_text()\n"
            "        self.assertEqual(text, 'line of pytest\\n')\n",
        },
    )
    folder(
        root,
        "server-that-stays",
        files={
            "solution/solve.sh": "cd /app && echo 'line of server-that-stays' > out.txt\n"
            "nohup python3 -m http.server 8123 >/dev/null 2>&1 &\nsleep 1\n",
            "tests/test.sh": "#!/bin/bash\npython3 - <<'PY'\nimport urllib.request\ntry:\n"
            "    text = urllib.request.urlopen('http://127.0.0.1:8123/out.txt').read().decode()\n"
            "except OSError:\n    text = ''\n"
            "reward = str(int(text.startswith('line of')))\n"
            "open('/logs/verifier/reward.txt', 'w').write(reward)\nPY\n",
        },
    )
    folder(
        root,
        "separate",
        config=CLOSED
        + 'artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\n'.replace(
            "artifacts", "artifacts"
        ),
    )
    (root / "separate/task.toml").write_text(
        'schema_version = "1.4"\nartifacts = ["/app/out.txt"]\n'
        + CLOSED
        + '[verifier]\nenvironment_mode = "separate"\n'
    )
    folder(
        root,
        "separate-with-its-own-image",
        files={
            "task.toml": 'schema_version = "1.4"\n'
            + CLOSED
            + '[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\n'
            'command = "cp /app/out.txt /logs/artifacts/ || true"\n'
            '[verifier.environment]\nnetwork_mode = "no-network"\n',
            "tests/Dockerfile": DOCKERFILE
            + "COPY test.sh /tests/test.sh\nRUN chmod +x /tests/test.sh\n",
            "tests/test.sh": judging(
                "/logs/artifacts/out.txt", "line of separate-with-its-own-image"
            ),
        },
    )
    folder(
        root,
        "steps-mean",
        config=CLOSED + '[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n',
        files=steps(first=step("/app/one", "one"), second=step("/app/two", "two")),
    )
    (root / "steps-mean/steps/second/workdir").mkdir()
    (root / "steps-mean/steps/second/workdir/setup.sh").write_text("test ! -e /tests\n")
    folder(
        root,
        "steps-final",
        files={
            "task.toml": 'schema_version = "1.4"\nmulti_step_reward_strategy = "final"\n'
            + CLOSED
            + '[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n',
            **steps(first=step("/app/one", "one"), second=step("/app/two", "two")),
        },
    )
