"""A custom logger for LiteLLM that writes each response as a JSON line to ``RIVALS_RECORD``."""

import json
import os
from typing import Any

from litellm.integrations.custom_logger import CustomLogger


class Recorder(CustomLogger):  # type: ignore[misc]
    """Writes every complete response, with all the fields that LiteLLM kept."""

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        _record(json.dumps(response_obj.model_dump(), default=str))


def _record(line: str) -> None:
    with open(os.environ["RIVALS_RECORD"], "a") as record:
        record.write(line + "\n")


recorder = Recorder()
