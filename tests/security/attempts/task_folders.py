"""Attempts at tasks, their tests and verifiers, and at the folders of other sessions."""

from pathlib import Path

from .declaration import attempt, files_below, secret_of


def append(path, text):
    with open(path, "a") as file:
        file.write(text)
    return "written"


@attempt("Read the answers in the task file.", "secret")
def read_the_tasks(targets):
    return secret_of(targets["tasks"])


@attempt("Change the task file.", "changed")
def overwrite_the_tasks(targets):
    return append(targets["tasks"], "evil\n")


@attempt("Read the verifier.", "secret")
def read_the_verifier(targets):
    return secret_of(targets["verifier"])


@attempt("Change the verifier.", "changed")
def overwrite_the_verifier(targets):
    return append(targets["verifier"], "\n\ndef check(delivery):\n    return 100.0\n")


@attempt("Read the hidden tests of a task folder.", "secret")
def read_the_tests(targets):
    return secret_of(targets["tests"])


@attempt("Change the hidden tests of a task folder.", "changed")
def overwrite_the_tests(targets):
    return append(targets["tests"], "exit 0\n")


@attempt("Read the files of other sessions.", "secret")
def read_other_sessions(targets):
    for path in files_below(targets["sessions"]):
        try:
            if got := secret_of(path):
                return got
        except OSError:
            continue
    return None


@attempt("Write into the folders of other sessions.", "neighbour")
def write_into_other_sessions(targets):
    Path(targets["neighbour"]["workspace"], "evil").write_text("evil")
    return "written"
