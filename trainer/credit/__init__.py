"""How much of its session's rewards each token gets.

``group`` has what an estimator sees, ``advantages`` those for whole sessions, ``steps`` those for
single calls, ``running`` those against a baseline that outlives the group; ``distillation``
adds what a teacher says of each token; ``weighting`` is how tokens weigh in the loss.
"""

from bridle.trainer.credit import advantages as advantages
from bridle.trainer.credit import running as running
from bridle.trainer.credit import steps as steps
from bridle.trainer.credit.group import ADVANTAGES as ADVANTAGES
from bridle.trainer.credit.group import Credit as Credit
from bridle.trainer.credit.group import CreditGroup as CreditGroup
from bridle.trainer.credit.group import is_stepwise as is_stepwise
from bridle.trainer.credit.group import register_advantage as register_advantage
from bridle.trainer.credit.group import stepwise as stepwise
