"""The agent's program: runs attempts inside a session, and reports on them in its call.

``attack.py PROMPT`` begins with a look at what earlier sessions left. A prompt that names an
attempt makes the session try that one alone; any other makes it try all that leave it alive. The
report goes into the record as the call's ``metadata``; the answer is the parity of the reply.
"""

import json
import sqlite3
import sys
import time
import urllib.request
from pathlib import Path

from . import ATTEMPTS
from .caches import inherited, library
from .keys import session

STAY_S = 5
"""Minimum duration of a session in seconds. Sessions that start together meet in it."""


def tried(attempt, targets):
    """Return the name, the refusal if there was one, and what the attempt got."""
    try:
        return attempt.name, "", attempt.run(targets) or ""
    except (OSError, sqlite3.Error) as error:
        return attempt.name, repr(error), ""


def attack(targets, names):
    """Make attempts, and stay until others that were started with this session make theirs."""
    began, left = time.monotonic(), inherited(targets)
    made = [tried(ATTEMPTS[name], targets) for name in names]
    time.sleep(max(0.0, began + STAY_S - time.monotonic()))
    return {"began": began, "ended": time.monotonic(), "inherited": left, "attempts": made}


def call(prompt, report):
    root, name, key = session()
    message = {"role": "user", "content": prompt}
    body = {"model": "policy", "max_tokens": 4, "messages": [message], "metadata": report}
    request = urllib.request.Request(  # noqa: S310
        f"{root}/s/{name}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
        return json.load(reply)["choices"][0]["message"]["content"]


def main(folder):
    targets = json.loads((Path(folder) / "targets.json").read_text())
    targets["mark"] = f"{targets['mark']} {session()[1]}"
    targets["folders"]["library"].append(library())
    prompt = sys.argv[1]
    named = [name for name in ATTEMPTS if name in prompt.split()]
    everything = [name for name in targets["names"] if name not in targets["alone"]]
    if named:
        call(prompt, {"alone": named})
    report = attack(targets, named or everything)
    content = call(prompt, report) if not named else ""
    print(sum(map(ord, content)) % 2)
