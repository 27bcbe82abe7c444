"""The fleets, which run many sessions at once.

Sessions run in this machine's processes, or with Ray on any number of nodes. ``base`` has the
protocol and a session's plan, ``local`` and ``ray`` the two fleets.
"""

from bridle.harnesses.fleet.base import Fleet as Fleet
from bridle.harnesses.fleet.base import SessionPlan as SessionPlan
from bridle.harnesses.fleet.local import LocalFleet as LocalFleet
