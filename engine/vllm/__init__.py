"""The real engine: vLLM launched, checked at start-up, and given new weights.

vLLM runs in its own process with its own Python; nothing here imports it, or torch. What it imports
of ours lies in ``inside/``.
"""

from engine.vllm.adapters import AdapterPublisher
from engine.vllm.checks import Check, Expectation, check_engine, failures
from engine.vllm.control import VllmControl
from engine.vllm.flags import VllmOptions
from engine.vllm.installation import VllmError, find_installation
from engine.vllm.launch import VllmServer

__all__ = [
    "AdapterPublisher",
    "Check",
    "Expectation",
    "VllmControl",
    "VllmError",
    "VllmOptions",
    "VllmServer",
    "check_engine",
    "failures",
    "find_installation",
]
