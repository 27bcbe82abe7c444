"""An agent that is after its reward: run by ``test_hostile_agent.py`` as a harness.

It asks its one question, then tries every way to a reward that it knows: its own key, no key, keys
that it finds in other processes, and a child that outlives it. What it achieved goes to the file
that its first argument names.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BASE = os.environ["OPENAI_BASE_URL"]
ROOT, _, SESSION = BASE.removesuffix("/v1").rpartition("/s/")
V1 = f"{ROOT}/bridle/v1"
OWN = os.environ["OPENAI_API_KEY"]
BONUS = {"name": "reward", "value": 100.0}


def send(method: str, url: str, body: object, key: str | None) -> int:
    request = urllib.request.Request(url, json.dumps(body).encode(), method=method)  # noqa: S310
    request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def found_keys() -> set[str]:
    """Keys in the environments and command lines of other processes, and in usual files."""
    texts = []
    for pattern in ("[0-9]*/environ", "[0-9]*/cmdline"):
        for path in Path("/proc").glob(pattern):
            try:
                texts.append(path.read_bytes())
            except OSError:
                continue
    keys = re.findall(rb"BRIDLE_ADMIN_KEY=([^\0]+)|(brv_[\w.-]+)", b"\0".join(texts))
    return {one.decode() for pair in keys for one in pair if one}


def attack(when: str) -> list[object]:
    done: list[object] = []
    for key in (OWN, None, *found_keys()):
        others = json.loads(os.environ.get("OTHER_SESSIONS", "[]"))
        for session in (SESSION, *others):
            at = f"{V1}/sessions/{session}"
            done.append([when, "reward", send("POST", f"{at}/rewards", BONUS, key)])
            done.append([when, "seal", send("POST", f"{at}/seal", {"outcome": "x"}, key)])
        done.append([when, "engine", send("POST", f"{V1}/engines", {"url": ROOT}, key)])
        done.append([when, "open", send("POST", f"{V1}/sessions", {}, key)])
    return done


def main() -> None:
    log = Path(sys.argv[1])
    ask = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}
    assert send("POST", f"{BASE}/chat/completions", ask, OWN) == 200
    with log.open("a") as file:
        file.write(json.dumps(attack("inside")) + "\n")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # Without the mark by which a sandbox may look for what it started.
            late = "import runpy, sys; sys.argv = ['', *sys.argv[1:]]; " + (
                "runpy.run_path(sys.argv[2])['later'](sys.argv[1])"
            )
            kept = {name: os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY")}
            os.execve(sys.executable, [sys.executable, "-c", late, str(log), __file__], kept)  # noqa: S606
        os._exit(0)
    print("wrong answer")


def later(log: str) -> None:
    time.sleep(2)
    with Path(log).open("a") as file:
        file.write(json.dumps(attack("after the seal")) + "\n")


if __name__ == "__main__":
    main()
