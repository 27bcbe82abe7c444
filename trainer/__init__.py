"""The trainer, which makes better weights from recorded sessions.

:mod:`bridle.trainer.loop` is GRPO from end to end, :mod:`bridle.trainer.sft.sft` supervised
fine-tuning; settings are in :mod:`bridle.trainer.config`. Modules are imported by name, so that
only what needs torch loads it.
"""
