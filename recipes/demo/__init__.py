"""``bridle demo``: the whole loop on a small LangChain agent, from nothing to a better policy."""

from typing import Literal

DemoPolicy = Literal["smollm2", "tiny"]
"""The policy of the demo. ``smollm2`` is SmolLM2-135M-Instruct, as it was published. ``tiny`` has
random weights that are warm-started on a scripted teacher; it calls tools."""
