"""The policy as a Transformers model: loading, saving, and logprobs of just the needed tokens."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging as transformers_logging

from bridle.engine.contract.tokenizer import CHAT_TEMPLATES_DIRECTORY
from bridle.engine.embedded.model import not_loadable
from bridle.engine.embedded.routing import Unreplayable
from bridle.errors import BridleError
from bridle.trainer.batch.attention import TREE_ATTENTION, TreePlans, in_trees
from bridle.trainer.batch.packing import IDLE, Index, Pack, longest_branch
from bridle.trainer.batch.recurrence import fork_states, forks_states, plan_states
from bridle.trainer.config import ComputeConfig, LoraConfig
from bridle.trainer.policy.compute import (
    choose_device,
    computed_dtype,
    computing,
    in_bfloat16,
    place,
)
from bridle.trainer.policy.drawn import Drawn, at_least_float32
from bridle.trainer.policy.head import Head, why_not_its_own
from bridle.trainer.policy.lora import adapters, add_adapters, merged_state
from bridle.trainer.policy.rounding import rounded_as
from bridle.trainer.policy.routing import accept_routing, routing_of
from bridle.trainer.policy.sharding import gathered, load_state, share_of, within_forward
from bridle.trainer.policy.sparse import require_within_index

log = logging.getLogger(__name__)

DType = Literal["float32", "float64", "bfloat16"]

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
LOGIT_ELEMENTS: Final = 1 << 25
"""Maximum number of logits held at once (128 MiB in float32); more targets go in recomputed
chunks."""

ON_CPU: Final = ComputeConfig(device="cpu")


class UnsupportedModel(BridleError, ValueError):
    """There is no model to load, or this trainer does not reproduce how it computes logits."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The policy's scores of the ``M`` targets of a pack, in their order."""

    logprobs: Tensor
    """``float[M]`` in the distribution that the target was drawn from; carries gradients."""
    entropies: Tensor
    """``float[M]``, nats, of the distribution the target was predicted from. It has a gradient only
    if that was asked for."""


def check_policy(directory: Path) -> None:
    """Raise :class:`UnsupportedModel` if ``directory`` is not that of a model.

    No weights are read.
    """
    try:
        AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(not_loadable(directory, error)) from error


def load_policy(
    directory: str | Path,
    *,
    dtype: DType = "float32",
    compute: ComputeConfig = ON_CPU,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Load the causal LM in ``directory``, ready for tree attention.

    It is in evaluation mode (no dropout). ``dtype`` is the type of its weights, whatever
    ``compute`` states for forward passes. With a ``mesh`` it is spread
    (:mod:`bridle.trainer.policy.sharding`), and ``compute`` names this process's device. Raises
    :class:`UnsupportedModel` if there is none, and for families whose changes to logits are not
    known here. Also raises :class:`bridle.trainer.policy.compute.UnsupportedCompute`.
    """
    return place(_read(directory, dtype), compute, mesh)


def _read(directory: str | Path, dtype: DType) -> nn.Module:
    """Read the causal LM in ``directory`` onto the CPU."""
    try:
        with _without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), attn_implementation=TREE_ATTENTION
            )
    except Exception as error:
        raise UnsupportedModel(not_loadable(directory, error)) from error
    if (why := why_not_its_own(model)) is not None:
        raise UnsupportedModel(f"{directory} is not supported by the trainer: {why}")
    fork_states(model)
    try:
        accept_routing(model)
    except Unreplayable as error:
        # Sessions without recorded experts, which are most, can be trained all the same.
        log.warning("recorded routing is not replayed: %s", error)
    loaded: nn.Module = model
    return loaded


def trainable_policy(
    directory: str | Path,
    compute: ComputeConfig,
    lora: LoraConfig,
    seed: int = 0,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Load a policy as :func:`load_policy` does, with adapters if ``lora`` has a rank.

    The weights below adapters are not trained, so they are kept in the type that they are computed
    in.
    """
    rounded = lora.rank > 0 and in_bfloat16(choose_device(compute.device), compute)
    model = _read(directory, "bfloat16" if rounded else "float32")
    if lora.rank:
        try:
            add_adapters(model, lora, seed)
        except ValueError as error:
            raise UnsupportedModel(f"{directory} cannot have adapters: {error}") from error
    return place(model, compute, mesh)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under the names that a checkpoint has, tied ones once, adapters merged in.

    Otherwise they are the model's own, not copies. If the model is spread, they are on the CPU of
    the first process, and the other processes get none.
    """
    policy = _transformers(model)
    whole = gathered(model, merged_state(policy))
    if not whole:
        return {}
    tensors = remove_tied_weights_from_state_dict(whole, policy)
    tensors = revert_weight_conversion(policy, tensors)
    return dict(tensors)


def save_policy(
    model: nn.Module,
    directory: Path,
    tokenizer_from: Path | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    types_from: Path | None = None,
) -> None:
    """Write ``model`` as safetensors with its config, and the tokenizer files beside it.

    ``tensors`` are written instead of its own weights, as :func:`checkpoint_tensors` returned them.
    With ``types_from``, a model directory, they are rounded to the 16 bits that they have there
    (:func:`bridle.trainer.policy.rounding.rounded_as`). With several processes, the first one
    writes.
    """
    chosen: dict[str, Any] = {}
    share = share_of(model)
    if tensors is None and (adapters(model) or share.processes > 1 or types_from is not None):
        tensors = checkpoint_tensors(model)
    if not share.is_first:
        return
    if types_from is not None and tensors is not None:
        tensors = rounded_as(tensors, types_from)
    if tensors is not None:
        chosen = {"state_dict": dict(tensors), "save_original_format": False}
    with _without_progress_bars():
        _transformers(model).save_pretrained(directory, max_shard_size="1000GB", **chosen)
    if tensors is not None:
        # Transformers writes the type of the model itself.
        config = copy(_transformers(model).config)
        config.dtype = next(iter(tensors.values())).dtype
        config.save_pretrained(directory)
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).exists():
                shutil.copyfile(tokenizer_from / name, directory / name)
        templates = tokenizer_from / CHAT_TEMPLATES_DIRECTORY
        if templates.is_dir():
            shutil.copytree(templates, directory / templates.name, dirs_exist_ok=True)


def restore_policy(model: nn.Module, directory: Path) -> None:
    """Put the weights that :func:`save_policy` wrote to ``directory`` into ``model``.

    They are loaded into a second model first, because in a checkpoint some families have other
    names and shapes than in memory. Raises ``ValueError`` or ``OSError`` if they are not a version
    of ``model``.
    """
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        written = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    own = {name: list(each.shape) for name, each in checkpoint_tensors(model).items()}
    if share_of(model).is_first and written != own:
        raise ValueError("it holds other tensors")
    with _without_progress_bars():
        other = AutoModelForCausalLM.from_pretrained(
            directory, dtype=next(model.parameters()).dtype
        )
    load_state(model, other.state_dict())


def score_pack(
    model: nn.Module,
    pack: Pack,
    *,
    block_tokens: int = 256,
    drawn: Drawn | None = None,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Compute logprobs and entropies of the pack's targets in one forward pass.

    ``drawn`` states what each target was drawn from; ``None`` means that all were drawn from the
    policy's own distribution. Entropies have a gradient with ``entropy_gradient``. Experts that the
    pack has are replayed (:mod:`bridle.trainer.policy.routing`). Raises
    :class:`bridle.trainer.policy.sparse.SequenceTooLong`, and
    :class:`bridle.trainer.policy.routing.RoutingDiffers`.
    """
    require_within_index(model, longest_branch(pack))
    arguments = (model, pack, block_tokens, drawn, entropy_gradient)
    return TokenScores(*within_forward(model, _score_pack, *arguments))


def score_idly(model: nn.Module) -> None:
    """Run a forward pass that changes nothing, and a backward pass of it if gradients are enabled.

    A process that has no pack left must do this while others have one.
    """
    scores = score_pack(model, IDLE)
    if torch.is_grad_enabled():
        (scores.logprobs.sum() * 0).backward()  # type: ignore[no-untyped-call]


def _score_pack(
    model: nn.Module, pack: Pack, block_tokens: int, drawn: Drawn | None, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    sources = torch.from_numpy(pack.sources).to(device)
    targets = torch.from_numpy(pack.targets).to(device)
    head = Head.of(model)
    with computing(model):
        if pack.layout == "padded":
            hidden = _padded_hidden_states(model, pack, device)
        else:
            hidden = _tree_hidden_states(model, pack, block_tokens, device)
        return _score_targets(hidden, head, sources, targets, drawn, entropy_gradient)


def score_sequence(model: nn.Module, token_ids: Index) -> Tensor:
    """Return the logprob of each of ``T`` ids given its predecessors, ``float[T-1]``.

    The ids are scored alone and unpacked.
    """
    require_within_index(model, len(token_ids) - 1)
    return within_forward(model, _score_sequence, model, token_ids)


def _score_sequence(model: nn.Module, token_ids: Index) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(device)
    head = Head.of(model)
    with computing(model):
        output = _backbone(model)(input_ids=ids[None, :-1], use_cache=False)
        logits: Tensor = head(output.last_hidden_state[0])
    return _log_softmax(logits).gather(1, ids[1:, None]).squeeze(1)


def _tree_hidden_states(
    model: nn.Module, pack: Pack, block_tokens: int, device: torch.device
) -> Tensor:
    """Return the hidden states of a forest, ``float[N, hidden]``."""
    states: dict[str, Any] = {}
    if forks_states(model):
        states["tree_states"] = plan_states(pack.parents, device)
    if pack.routed_experts is not None:
        states |= routing_of(model, pack.routed_experts)
    token_ids = torch.from_numpy(pack.token_ids)[None].to(device)
    with in_trees(TreePlans(pack, block_tokens, device, computed_dtype(model))):
        output = _backbone(model)(
            input_ids=token_ids,
            position_ids=torch.from_numpy(pack.positions)[None].to(device),
            # Without a mask Transformers reads the ends of branches from the positions.
            attention_mask=torch.ones_like(token_ids),
            use_cache=False,
            **states,
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _padded_hidden_states(model: nn.Module, pack: Pack, device: torch.device) -> Tensor:
    """Return the hidden states of chains, ``float[N, hidden]``.

    They are computed as rows padded on the right. Causal attention never looks to the right, so
    padding needs no mask.
    """
    rows = np.cumsum(pack.parents < 0) - 1
    token_ids = torch.zeros(int(rows[-1]) + 1, int(pack.positions.max()) + 1, dtype=torch.int64)
    token_ids[rows, pack.positions] = torch.from_numpy(pack.token_ids)
    routing: dict[str, Tensor] = {}
    if pack.routed_experts is not None:
        places = torch.from_numpy(rows * token_ids.shape[1] + pack.positions).to(device)
        routing = routing_of(model, pack.routed_experts, places, token_ids.numel())
    output = _backbone(model)(input_ids=token_ids.to(device), use_cache=False, **routing)
    hidden: Tensor = output.last_hidden_state[rows, pack.positions]
    return hidden


def _score_targets(
    hidden: Tensor,
    head: Head,
    sources: Tensor,
    targets: Tensor,
    drawn: Drawn | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Apply ``head`` to the hidden states that predict something, each once."""
    if drawn is not None:
        drawn = drawn.to(hidden.device)
    needed, inverse = torch.unique(sources, return_inverse=True)
    chunk = max(1, LOGIT_ELEMENTS // head.vocabulary)
    logprobs = []
    entropies = []
    order = torch.argsort(inverse, stable=True)
    starts = torch.searchsorted(
        inverse[order], torch.arange(0, len(needed) + chunk, chunk, device=inverse.device)
    )
    for number, (start, stop) in enumerate(pairwise(starts.tolist())):
        states = hidden[needed[number * chunk : (number + 1) * chunk]]
        wanted = order[start:stop]
        rows = inverse[wanted] - number * chunk
        at = None if drawn is None else drawn.of(wanted)
        arguments = (head, states, rows, targets[wanted], at, entropy_gradient)
        if len(needed) > chunk and torch.is_grad_enabled():
            scores = checkpoint(_score_chunk, *arguments, use_reentrant=False)
        else:
            scores = _score_chunk(*arguments)
        logprobs.append(scores[0])
        entropies.append(scores[1])
    restore = torch.empty_like(order)
    restore[order] = torch.arange(len(order), device=order.device)
    return torch.cat(logprobs)[restore], torch.cat(entropies)[restore]


def _score_chunk(
    head: Head,
    states: Tensor,
    rows: Tensor,
    targets: Tensor,
    drawn: Drawn | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(states)
    if drawn is not None:
        logits, rows = drawn.apply(logits, rows, targets)
    log_probabilities = _log_softmax(logits)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = entropy(log_probabilities)[rows]
    return log_probabilities[rows, targets], entropies


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats of distributions ``float[..., V]``; their zeros add nothing.

    The gradient at a zero is 0, where that of ``p log p`` is not finite.
    """
    finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0.0)
    return -(log_probabilities.exp() * finite).sum(dim=-1)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log softmax of ``logits`` in at least float32, as the engine does."""
    return torch.log_softmax(at_least_float32(logits), dim=-1)


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of token ids that the model can be given."""
    return Head.of(model).vocabulary


def _transformers(model: nn.Module) -> Any:
    """Return the model with its Transformers methods, which have no types."""
    return model


def _backbone(model: nn.Module) -> Any:
    """Return the model without its output head."""
    base = _transformers(model).base_model
    # Llama 4's text model names another class's part as its base.
    return _transformers(model).model if base is model else base


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide progress bars: loading and saving a checkpoint shard is not worth a bar of its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
