"""The real engine: vLLM launched, checked at start-up, and given new weights.

vLLM runs in its own process with its own Python. The modules of ours that it imports lie in
``inside/``; no other module here imports vLLM, and only ``transfer`` needs torch.
"""

from bridle.engine.vllm.checks import Check, Expectation, check_engine, failures
from bridle.engine.vllm.control import VllmControl
from bridle.engine.vllm.flags import VllmOptions
from bridle.engine.vllm.installation import VllmError, find_installation
from bridle.engine.vllm.launch import VllmServer
from bridle.engine.vllm.lora import VllmLora

__all__ = [
    "Check",
    "Expectation",
    "VllmControl",
    "VllmError",
    "VllmLora",
    "VllmOptions",
    "VllmServer",
    "check_engine",
    "failures",
    "find_installation",
]
