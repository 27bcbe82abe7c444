"""Siblings: new sessions that re-enter a recorded one at one of its calls, several at a time.

- ``recording`` is a recorded session as the control API returns it
- ``commands`` starts the command of a session of ``bridle run`` again, in copies of its folder
- ``jobs`` runs the task of a session of a run again, with the agent and sandbox that the run states

Both are :class:`Siblings`.
"""

from bridle.run.siblings.recording import Entry as Entry
from bridle.run.siblings.recording import NotReentrant as NotReentrant
from bridle.run.siblings.recording import Recording as Recording
from bridle.run.siblings.recording import Sibling as Sibling
from bridle.run.siblings.recording import Siblings as Siblings
