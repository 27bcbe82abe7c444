"""``python -m proxy --upstream URL --store URL``: a proxy with the plainest options.

``bridle proxy`` is the command for people; this one needs nothing but the proxy's own room.
The admin key comes from ``BRIDLE_ADMIN_KEY``: a command line is for everyone to read.
"""

from __future__ import annotations

import argparse
import os

from bridle.proxy.server import run
from bridle.proxy.settings import ProxySettings


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m proxy", description=__doc__)
    options.add_argument(
        "--upstream", required=True, action="append", help="base URL of an engine; again for more"
    )
    options.add_argument("--store", required=True, help="SQLAlchemy URL or path of the store")
    options.add_argument("--synchronous", default="NORMAL", choices=["NORMAL", "FULL"])
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8484)
    options.add_argument("--model", default=None, help="served model name")
    given = options.parse_args()
    run(
        ProxySettings(
            upstream_url=given.upstream[0],
            more_engines=tuple(given.upstream[1:]),
            store_url=given.store,
            synchronous=given.synchronous,
            host=given.host,
            port=given.port,
            model=given.model,
            admin_key=os.environ.get("BRIDLE_ADMIN_KEY") or None,
        )
    )


if __name__ == "__main__":
    main()
