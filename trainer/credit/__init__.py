"""Credit assignment: the advantage of each token, from its session's rewards.

``group`` defines what an estimator sees. ``advantages`` has the estimators for whole sessions,
``steps`` those for single calls, ``branching`` those that read re-entries, and ``running`` those
against a baseline that outlives the group. ``critic`` learns the values of states. ``aem`` reads
the entropy of replies, and ``igpo`` the policy's likelihood of the answer. ``anchors`` are
the states by which single calls are compared. ``distillation`` adds a teacher's scores of each
token, and ``weighting`` sets the weights of tokens in the loss.
"""

from bridle.trainer.credit import advantages as advantages
from bridle.trainer.credit import aem as aem
from bridle.trainer.credit import branching as branching
from bridle.trainer.credit import critic as critic
from bridle.trainer.credit import igpo as igpo
from bridle.trainer.credit import running as running
from bridle.trainer.credit import steps as steps
from bridle.trainer.credit.group import ADVANTAGES as ADVANTAGES
from bridle.trainer.credit.group import Credit as Credit
from bridle.trainer.credit.group import CreditGroup as CreditGroup
from bridle.trainer.credit.group import Likelihoods as Likelihoods
from bridle.trainer.credit.group import estimated as estimated
from bridle.trainer.credit.group import is_remembering as is_remembering
from bridle.trainer.credit.group import is_scoring as is_scoring
from bridle.trainer.credit.group import is_stepwise as is_stepwise
from bridle.trainer.credit.group import register_advantage as register_advantage
from bridle.trainer.credit.group import remembering as remembering
from bridle.trainer.credit.group import scoring as scoring
from bridle.trainer.credit.group import stepwise as stepwise
