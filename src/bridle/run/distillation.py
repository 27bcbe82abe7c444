"""The teacher that a run's settings name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridle.errors import UsageError
from bridle.run.environment import is_base_url, key_in
from bridle.trainer.config import DistillationConfig
from bridle.trainer.credit.distillation import AskTeacher, Teacher


def require_teacher(config: DistillationConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for a teacher that cannot be asked as configured."""
    if config.url and not is_base_url(config.url):
        raise UsageError(f"distillation.url: {config.url!r} is not an HTTP URL")
    if config.url:
        _key(config)


@contextmanager
def teaching(config: DistillationConfig) -> Iterator[AskTeacher | None]:
    """Yield the function that asks the configured teacher, once the teacher has answered.

    Yield ``None`` if none is configured.

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
