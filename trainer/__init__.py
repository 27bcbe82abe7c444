"""Recorded sessions in, better weights out.

:mod:`trainer.loop` is GRPO from end to end, :mod:`trainer.sft` supervised fine-tuning; settings are
in :mod:`trainer.config`. Modules are imported by name, so that only what needs torch loads it.
"""
