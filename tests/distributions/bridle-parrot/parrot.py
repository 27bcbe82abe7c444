"""The harness ``parrot``: asks its model once, and prints the reply ``PARROT_TIMES`` times."""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def main() -> None:
    message = {"role": "user", "content": sys.argv[1]}
    request = urllib.request.Request(  # noqa: S310
        os.environ["PARROT_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["PARROT_MODEL"], "messages": [message]}).encode(),
        {
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["PARROT_KEY"],
        },
    )
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        said = json.load(reply)["choices"][0]["message"]["content"]
    print(" ".join([said] * int(os.environ.get("PARROT_TIMES", "1"))))


if __name__ == "__main__":
    main()
