"""A Transformers causal LM that computes a ragged batch in one forward pass."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bridle.engine.embedded.attention import ATTENTION_NAME, Chunk, RaggedBatch
from bridle.engine.embedded.kv import SequenceKV
from bridle.engine.embedded.routing import Routers
from bridle.errors import BridleError

_LOADING: Final = threading.Lock()
_PROBE_TOKENS: Final = 24
_PROBE_TOLERANCE: Final = 5e-3
"""Largest difference of a logit, relative to the largest logit, between the packed forward pass
and the model's own: numerical noise is far below, another architecture's attention far above."""


class UnservableModel(BridleError):
    """There is no model that can be loaded, or this engine cannot serve it exactly."""


class WeightsMismatch(BridleError):
    """New weights do not fit the served model; nothing was changed."""


class PackedModel:
    """A model in evaluation mode whose attention is ours. All calls must come from one thread."""

    def __init__(self, directory: str | Path, *, device: str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        self._dtype = dtype
        self._model = load_model(directory, dtype).to(self.device)
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)
        routers = Routers.of(self._model)
        self._chosen_experts = None if routers is None else routers.record()
        self.kv_bytes_per_token = 0
        """Bytes of keys and values per computed token, as measured by the probe."""
        self._probe()

    @property
    def context(self) -> int | None:
        """The longest sequence that the model was made for, if its configuration states it."""
        config = self._model.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None)
        return None if found is None else int(found)

    def forward(
        self,
        token_ids: Sequence[int],
        decoding: Sequence[SequenceKV],
        chunks: Sequence[Chunk],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Compute a row of tokens.

        Return logits ``[len(wanted), V]`` of the row positions ``wanted``.

        ``token_ids`` are one new token of each of ``decoding``, then the tokens of each chunk. The
        sequences' keys and values are extended, and count the new tokens afterwards.
        """
        positions = [kv.length for kv in decoding]
        for kv in decoding:
            kv.reserve(kv.length + 1)
        for chunk in chunks:
            chunk.kv.reserve(chunk.kv.length + chunk.count)
            positions += range(chunk.kv.length, chunk.kv.length + chunk.count)
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            ragged=RaggedBatch(tuple(decoding), tuple(chunks)),
        )
        if self._chosen_experts is not None:
            self._note_experts(self._chosen_experts(), decoding, chunks)
        for kv in decoding:
            kv.length += 1
        for chunk in chunks:
            chunk.kv.length += chunk.count
        logits: torch.Tensor = output.logits[0]
        return logits

    def _note_experts(
        self,
        experts: torch.Tensor | None,
        decoding: Sequence[SequenceKV],
        chunks: Sequence[Chunk],
    ) -> None:
        if experts is None:
            return
        at = len(decoding)
        for row, kv in enumerate(decoding):
            kv.note_experts(experts[row : row + 1])
        for chunk in chunks:
            chunk.kv.note_experts(experts[at : at + chunk.count])
            at += chunk.count

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the served parameters and buffers by name, not as copies."""
        state: Mapping[str, torch.Tensor] = self._model.state_dict()
        return state

    def digest(self) -> str:
        """Return the SHA-256 (hex) of names, shapes, types and values of the served weights."""
        digest, seen = hashlib.sha256(), set[int]()
        for name, tensor in sorted(self.weights().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            if tensor.data_ptr() not in seen:  # tied weights are one
                seen.add(tensor.data_ptr())
                values = tensor.detach().cpu().contiguous().flatten()
                digest.update(values.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy ``state`` over the served weights, all or nothing.

        Names and shapes must be the model's own; of tied weights one name is enough. Raise
        :class:`WeightsMismatch` if they do not fit.
        """
        served = self.weights()
        _check_fit(served, state)
        with torch.no_grad():
            for name, tensor in state.items():
                served[name].copy_(tensor)

    def _probe(self) -> None:
        """Compare the packed forward pass with the model's own, once, at load time.

        Raise :class:`UnservableModel` if they differ.
        """
        ids = [index % self.vocab_size for index in range(3, 3 + _PROBE_TOKENS)]
        with torch.inference_mode():
            row = torch.tensor([ids], device=self.device)
            expected = self._model(input_ids=row, use_cache=False).logits[0].float()
            try:
                self._model.set_attn_implementation(ATTENTION_NAME)
                found = self._probe_packed(ids).float()
            except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
                raise UnservableModel(
                    f"{type(self._model).__name__} does not run with packed attention: {error}. "
                    "Serve it with vLLM."
                ) from error
        gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not gap <= _PROBE_TOLERANCE * (1 if self._dtype == torch.float32 else 10):
            raise UnservableModel(
                f"{type(self._model).__name__} gives other logits with packed attention (relative "
                f"difference {gap:.2g}): its layers are not plain causal attention. Serve it with "
                "vLLM."
            )

    def _probe_packed(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of ``ids``, computed in parts beside another sequence.

        The parts are two chunks and single tokens.
        """
        kv, other = SequenceKV(0), SequenceKV(0)
        first, second = len(ids) // 2, len(ids) // 4
        rows = [self.forward(ids[:first], [], [Chunk(kv, first)], range(first))]
        tokens = [*ids[:3], *ids[first : first + second]]
        chunks = [Chunk(other, 3), Chunk(kv, second)]
        rows.append(self.forward(tokens, [], chunks, range(3, 3 + second)))
        for token_id in ids[first + second :]:
            rows.append(self.forward([ids[0], token_id], [other, kv], [], [1]))
        self.kv_bytes_per_token = kv.bytes_per_token
        return torch.cat(rows)


def load_model(directory: str | Path, dtype: torch.dtype) -> Any:
    """Return the causal LM in ``directory``, in evaluation mode.

    Raise :class:`UnservableModel` if it cannot be loaded.
    """
    # A bar per reload would fill the trainer's terminal.
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        # Loading swaps the default device of the whole process for a moment: two engines that load
        # at the same time would get weights without data.
        with _LOADING:
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=dtype, local_files_only=True
            )
    except Exception as error:
        raise UnservableModel(not_loadable(directory, error)) from error
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()
    return model.eval().requires_grad_(False)


def not_loadable(directory: str | Path, error: Exception) -> str:
    """Return the message for ``error`` in one line.

    Transformers raises many errors for the values in a ``config.json``, some with several lines.
    """
    told = " ".join(str(error).split()) or type(error).__name__
    return f"no loadable causal LM in {directory}: {told}"


def load_state(directory: str | Path, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Return the weights in ``directory`` by the names of the loaded model.

    Raise :class:`WeightsMismatch` if they cannot be loaded.
    """
    try:
        state: Mapping[str, torch.Tensor] = load_model(directory, dtype).state_dict()
    except UnservableModel as error:
        raise WeightsMismatch(str(error)) from error
    return state


def _check_fit(served: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(state.keys() - served.keys())
    if unknown:
        raise WeightsMismatch(f"the served model has no weights named {', '.join(unknown[:3])}")
    for name, tensor in state.items():
        if tensor.shape != served[name].shape:
            raise WeightsMismatch(
                f"{name} is {tuple(tensor.shape)}, the served model's is "
                f"{tuple(served[name].shape)}"
            )
    covered = {served[name].data_ptr() for name in state}
    missing = sorted(name for name, tensor in served.items() if tensor.data_ptr() not in covered)
    if missing:
        raise WeightsMismatch(f"weights are missing: {', '.join(missing[:3])}")
