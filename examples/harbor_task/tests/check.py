"""Exits with 0 when the totals are right and the sales are unchanged."""

import hashlib
import json
import sys
from pathlib import Path

TOTALS = {"north": 215, "south": 150, "east": 55, "west": 420}
SALES = "f2274b95b47079e9223ef55ee8b4038d14a7aaa54da13349e9daf93267dd92e1"

app = Path(sys.argv[1] if len(sys.argv) > 1 else "/app")
if hashlib.sha256((app / "sales.csv").read_bytes()).hexdigest() != SALES:
    sys.exit("sales.csv was changed")
if json.loads((app / "totals.json").read_text()) != TOTALS:
    sys.exit("these are not the totals")
