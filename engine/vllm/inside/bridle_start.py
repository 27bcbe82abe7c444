"""A script that becomes vLLM's API server, and ends when the process that launched it ends.

Without it, vLLM would outlive a launcher that was killed: it would hold the machine's memory, and
serve a policy to which nobody publishes any more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "BRIDLE_LAUNCHER"
PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ[LAUNCHER]):
        sys.exit("the launcher has ended already")
    # python -m and not the vllm script: that one looks for a distribution named vllm, which the
    # CPU wheel is not.
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    main()
