"""Several threads may read messages of a type that none has read before."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading, types
import msgspec
from bridle.proxy.wire.types import examine

TYPES = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    name: str
    values: dict[str, int] = {}
class Outer(msgspec.Struct):
    first: Inner
    others: tuple[Inner, ...] = ()
    kind: int | None = None
'''
sys.setswitchinterval(1e-6)
for number in range(50):
    module = sys.modules[f"made_{number}"] = types.ModuleType(f"made_{number}")
    exec(TYPES, vars(module))
    examine()
    together = threading.Barrier(4)

    def read():
        together.wait()
        assert msgspec.convert({"first": {"name": "a"}}, module.Outer).first.name == "a"

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_read_a_type_of_message_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
