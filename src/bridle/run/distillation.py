"""The teacher that a run's settings name, and the context that its prompts hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.registry import require_parts
from bridle.run.environment import is_base_url, key_in
from bridle.trainer.config import DistillationConfig
from bridle.trainer.credit.distillation import AskTeacher, Teacher
from bridle.trainer.credit.privileged import CONTEXTS, Inform, Informer, plain


def require_teacher(config: DistillationConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for a teacher that cannot be asked as configured."""
    if config.url and not is_base_url(config.url):
        raise UsageError(f"distillation.url: {config.url!r} is not an HTTP URL")
    if config.url and config.teacher == "ema":
        raise UsageError(
            "distillation.url names a served teacher and distillation.teacher an average of the "
            "policy: leave out one of them"
        )
    if config.url:
        _key(config)
    if config.context and not config.teaches:
        raise UsageError(
            "distillation.context needs a teacher: set distillation.url, or distillation.teacher "
            "to ema"
        )
    require_parts(config.options, (CONTEXTS, config.context or "outcome"))


def informer(config: DistillationConfig, policy: Path) -> Inform:
    """Return the function that puts the configured context into the prompts of ``policy``.

    Raise :class:`bridle.errors.UsageError` if its chat template does not show the place, and
    :class:`bridle.engine.contract.tokenizer.TokenizerNotRead`.
    """
    return Informer(config, Tokenizer(policy)) if config.context else plain


@contextmanager
def teaching(config: DistillationConfig) -> Iterator[AskTeacher | None]:
    """Yield the function that asks the configured teacher, once the teacher has answered.

    Yield ``None`` if none is served.

    Raise :class:`bridle.trainer.credit.distillation.TeacherError`.
    """
    if not config.url:
        yield None
        return
    with Teacher(config, api_key=_key(config)) as teacher:
        teacher.served()
        yield teacher.gaps


def _key(config: DistillationConfig) -> str | None:
    if not config.key_variable:
        return None
    key = key_in(config.key_variable)
    if key is None:
        raise UsageError(f"distillation.key_variable: the environment has no {config.key_variable}")
    return key
