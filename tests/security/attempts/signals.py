"""Attempts with signals, and at what the machine has for all: processes and memory."""

import os
import signal
import time

from .declaration import attempt

ITS_OWN = {"container": "root can kill the process that reports the end of its session"}


@attempt("Kill a process of a neighbour by its number.", "neighbour")
def kill_the_neighbours_process(targets):
    os.kill(targets["neighbour"]["process"], signal.SIGKILL)
    return "sent"


@attempt("Kill the processes that started it.", "run", alone_in=ITS_OWN)
def kill_its_parents(targets):
    for number in targets["parents"] or {os.getppid(), 1} - {0}:  # 0 stands for its own group
        try:
            os.kill(number, signal.SIGKILL)
        except OSError:
            continue
    return None


@attempt("Kill every process that it may signal.", "run", alone_in=ITS_OWN)
def kill_everybody(targets):
    os.kill(targets["everybody"], signal.SIGKILL)
    return None


@attempt("End its own sandbox by every signal to the first process.", "run", alone=True)
def end_its_own_sandbox(targets):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        for process in targets["parents"] or {os.getppid(), 1} - {0}:
            try:
                os.kill(process, number)
            except OSError:
                continue
    return None


@attempt("Start processes without end.", "run", alone=True)
def start_processes_without_end(targets):
    end = time.monotonic() + targets["patience"]
    while time.monotonic() < end:
        try:
            if os.fork() == 0:
                time.sleep(targets["patience"])
                os._exit(0)
        except OSError:
            time.sleep(0.05)
    return None


@attempt("Take memory without end.", "run", alone=True)
def take_memory_without_end(targets):
    taken = []
    while len(taken) < targets["megabytes"]:
        taken.append(b"x" * (1 << 20))
    time.sleep(targets["patience"])
    return None
