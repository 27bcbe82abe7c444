"""Runs attempts one by one where nothing keeps them from success, each in a process of its own.

``controls.py FOLDER TOKEN`` reads a JSON object a line: the names of attempts, their targets, and
the folder and environment in which it runs them. It prints what they got and, with ``look``, what
is inherited.
"""

import json
import os
import sys


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from attempts import ATTEMPTS  # type: ignore[import-not-found]
    from attempts.caches import inherited  # type: ignore[import-not-found]

    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(asked["folder"])
            os.environ.update(asked["environment"])
            targets, answer = asked["targets"], {}
            try:
                for name in asked["names"]:
                    answer[name] = ATTEMPTS[name].run(targets)
                if asked["look"]:
                    answer["inherited"] = inherited(targets)
            except BaseException as error:  # noqa: BLE001 - reported
                answer["error"] = repr(error)
            if asked["wait"]:
                print(json.dumps(answer), flush=True)
            os._exit(0)
        if asked["wait"]:
            os.waitpid(pid, 0)
        else:
            print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    main()
