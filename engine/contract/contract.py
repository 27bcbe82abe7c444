"""The engine contract: the part of vLLM's HTTP face that Bridle relies on, and nothing more.

Every engine Bridle can record through answers these routes with these fields. The embedded engine
(``engine/embedded``) and the scripted engine (``engine/scripted``) implement it; vLLM 0.32 is its
source (docs/engine-contract.md). ``tests/conformance`` checks any base URL against it.

Data routes::

    POST /v1/chat/completions   messages, tools, tool_choice, stream, stream_options.include_usage,
                                max_tokens | max_completion_tokens, temperature, top_p, top_k, seed,
                                stop, n, logprobs, top_logprobs, prompt_logprobs,
                                return_token_ids, kv_transfer_params.prompt_token_ids
    POST /v1/completions        prompt as text (add_special_tokens, by default true) or as token
                                ids, echo-free; the same sampling fields
    POST /tokenize              {messages, tools, add_generation_prompt} or {prompt}
                                -> {tokens, count, max_model_len}
    GET  /v1/models             {data: [{id, max_model_len, root}]}
    GET  /health                200 when it serves

Control routes (never forwarded to clients)::

    POST /pause?mode=keep|wait|abort&clear_cache=true|false
    POST /resume
    POST /collective_rpc        {"method": "reload_weights", "kwargs": {"weights_path": DIR}}
    POST /reset_prefix_cache
    GET  /is_paused             {is_paused}
    GET  /version               {version}; our own engines add policy_version, weights_fingerprint
                                (the same wherever the same weights are served), samples (false
                                for a script), logprobs_mode, generation_config and grammars
                                (false: none constrains what they sample)
    GET  /server_info?config_format=json
                                {vllm_config: {model_config: {logprobs_mode, generation_config},
                                structured_outputs_config: {reasoning_parser,
                                enable_in_reasoning}}};
                                vLLM only
    GET  /weight_info           {weight_version}; vLLM only

With ``return_token_ids`` and ``logprobs`` a chat reply carries ``prompt_token_ids`` at the top
level, ``choices[i].token_ids`` and ``choices[i].logprobs.content[j].logprob``. When streaming, the
first chunk (the role chunk) carries ``prompt_token_ids`` and every later chunk the ``token_ids``
and logprobs of the tokens it stands for, also when its delta is empty because a parser holds the
text back. ``usage`` comes in a last chunk with ``choices: []``. ``token_ids`` include the stop
token, the text does not. ``kv_transfer_params.prompt_token_ids`` replaces templating and
tokenisation: the engine uses exactly those ids as the prompt and echoes them.

Errors are ``{"error": {"message", "type", "param", "code"}}`` with the HTTP status as ``code``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TOKENIZE: Final = "/tokenize"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
PAUSE: Final = "/pause"
RESUME: Final = "/resume"
IS_PAUSED: Final = "/is_paused"
RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
VERSION: Final = "/version"
SERVER_INFO: Final = "/server_info?config_format=json"
WEIGHT_INFO: Final = "/weight_info"
COLLECTIVE_RPC: Final = "/collective_rpc"

PauseMode = Literal["keep", "wait", "abort"]
"""The treatment of running requests at a pause: they are frozen, waited for, or ended."""

PROCESSED_LOGPROBS: Final = "processed_logprobs"
"""vLLM's name for the mode in which a token's logprob belongs to the distribution from which the
token was drawn."""
NEUTRAL_DEFAULTS: Final = "vllm"
"""vLLM's name of the generation configuration in which a request that names no sampling parameters
gets the policy's own distribution."""
MISSING_LOGPROB: Final = -9999.0
"""The value that vLLM writes for a missing logprob. A record with one is quarantined."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served policy as ``/v1/models`` describes it."""

    id: str
    """Name that requests use for it."""
    max_model_len: int | None
    """Maximum number of tokens of prompt and reply together, if the engine reports it."""
    root: str | None
    """Directory or hub name that the weights came from."""
