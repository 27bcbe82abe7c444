"""What a burst took and no longer needs is the system's again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

BURST = """
import asyncio, os
from bridle.proxy.free_memory import FreeMemory

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

async def main():
    held = [bytes(50_000) for _ in range(2_000)]
    pins = held[::100]  # what lives on keeps the heap from shrinking by itself
    del held
    burst = resident()
    free_memory = FreeMemory(every_s=0.05)
    free_memory.start()
    for _ in range(100):
        await asyncio.sleep(0.1)
        if resident() <= burst - 60:
            break
    await free_memory.close()
    print(burst, resident(), len(pins))

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_after_a_burst_memory_goes_back_although_some_of_it_lives_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BURST], capture_output=True, text=True, check=True, timeout=60
    )
    burst, after, _ = map(int, done.stdout.split())
    assert burst >= 95
    assert after <= burst - 60
