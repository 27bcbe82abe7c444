"""Attempts to hand a verifier something else than files of the session."""

import os
from pathlib import Path

from .declaration import attempt

LEFT = ("pipe", "endless", "shadow", "answer", "hard", "folder/tasks.jsonl", "tasks.jsonl")
"""Names that a careless verifier opens."""

EVIL = """
import os
try:
    open({mark!r}, "w").write("imported")
except OSError:
    pass
"""


@attempt("Leave a pipe, which a reader waits for.", "verifier")
def leave_a_pipe(targets):
    os.mkfifo("pipe")
    return None


@attempt("Leave a link to an endless device.", "verifier")
def leave_a_link_to_a_device(targets):
    os.symlink("/dev/zero", "endless")
    return None


@attempt("Leave links to files and folders of the machine.", "verifier")
def leave_links(targets):
    os.symlink("/etc/shadow", "shadow")
    os.symlink(targets["verifier"], "answer")
    os.symlink(Path(targets["tasks"]).parent, "folder")
    return None


@attempt("Leave a second name of a file of the machine.", "verifier")
def leave_a_hard_link(targets):
    os.link(targets["verifier"], "hard")
    return None


@attempt("Leave a file of a terabyte.", "run")
def leave_a_huge_file(targets):
    with open("huge", "wb") as file:
        file.truncate(1 << 40)
    return None


@attempt("Leave modules that a verifier would import in place of its own.", "changed")
def leave_modules(targets):
    for name in ("json.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "verifier.py"):
        Path(name).write_text(EVIL.format(mark=targets["imported"]))
    return None


@attempt("Put a link in the place of the workspace.", "verifier", alone=True)
def replace_the_workspace(targets):
    workspace = Path.cwd()
    workspace.rename(workspace.with_name("moved"))
    os.symlink(Path(targets["tasks"]).parent, workspace)
    return None
