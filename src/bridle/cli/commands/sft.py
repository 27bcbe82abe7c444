"""``bridle sft``: supervised fine-tuning on exported or recorded sessions."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.options import RewardSourcesOption, RunOption, StoreOption, model_path
from bridle.cli.reading import reader, require_run
from bridle.cli.rules import RulesOption, sample_rules
from bridle.cli.settings import configured
from bridle.cli.terminal import err, fail, out
from bridle.extras import needs_extra
from bridle.reconstruct.exports.selection import Selection
from bridle.run.holding import LOCK, hold
from bridle.trainer.config import SftConfig

if TYPE_CHECKING:
    from bridle.reconstruct.samples.sample import Conservation
    from bridle.trainer.learner.sft_update import SftExample


@configured(SftConfig, {"--loss": "loss"})
def sft(
    context: typer.Context,
    policy: Annotated[
        Path,
        typer.Option(
            parser=model_path, metavar="MODEL", help="To start from: directory or Hub name."
        ),
    ],
    output: Annotated[Path, typer.Option("--out", help="Model directory to write.")],
    store: StoreOption,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="An export as tokens, chat, trl or trl-prompt-completion; default: the store. "
            "--loss dpo takes one as preference, and --loss kto one as preference-labels.",
        ),
    ] = None,
    run: RunOption = None,
    where: Annotated[
        str | None, typer.Option(help="SQL on the columns of sessions, as harness = 'pi'.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Lowest reward of a session.")] = None,
    reward_source: RewardSourcesOption = None,
    rules: RulesOption = "{}",
    *,
    config: SftConfig,
) -> None:
    """Fine-tune a policy on recorded trajectories."""
    with needs_extra("train", "training needs the training extra"):
        from bridle.cli.ranks import run_on_each_device
        from bridle.run.recorded_sft import sft_run
        from bridle.trainer.learner.ranks import follow, learning
        from bridle.trainer.learner.world import World
        from bridle.trainer.policy.durable import atomic_directory
        from bridle.trainer.sft.sft import train_sft

    run_on_each_device(config.compute.device)
    if not World.current().is_first:
        follow(policy, config)
    context.with_resource(hold(output, output.with_name(f".{output.name}{LOCK}")))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        fail(f"{output} exists and is not empty: name another --out", 2)
    if config.loss != "sft":
        _on_preferences(policy, data, output, config)
        return
    left_out: Counter[str] = Counter()
    selection = Selection(
        run=run,
        sql=where,
        min_reward=min_reward,
        reward_sources=None if reward_source is None else tuple(reward_source),
        rules=sample_rules(rules, imitation=True),
    )
    taken: dict[str, Conservation] = {}
    examples = _examples(data, policy, store, selection, left_out, taken)
    for reason, count in left_out.items():
        out.print(f"left out: {count} {reason}")
    _print_rate(policy, config)
    recording = nullcontext() if data else sft_run(store, output.name, selection.rules, config)
    with recording as account, learning(policy, config) as learner:
        history = train_sft(learner, examples, config, console=out)
        with atomic_directory(output) as scratch:
            learner.save(scratch, policy)
        if account is not None:
            account(taken, len(history))
    first, last = history[0].loss, history[-1].loss
    out.print(f"{output}: {len(history)} updates, loss {first:.3f} → {last:.3f}")


def _print_rate(policy: Path, config: SftConfig) -> None:
    from bridle.trainer.learner.rates import rate_line, rate_warning

    out.print(rate_line(config))
    if (warning := rate_warning(config, policy)) is not None:
        err.print(f"warning: {warning}")


def _on_preferences(policy: Path, data: Path | None, output: Path, config: SftConfig) -> None:
    from bridle.trainer.policy.durable import atomic_directory
    from bridle.trainer.sft.preference import (
        read_preferences,
        require_one_process,
        train_preferences,
    )

    if data is None:
        fail(f"--loss {config.loss} needs --data, which `bridle export --format` writes", 2)
    require_one_process(config)
    rows = read_preferences(data, config.loss)
    _print_rate(policy, config)
    with (
        needs_extra("preference", f"--loss {config.loss} needs TRL"),
        atomic_directory(output) as scratch,
    ):
        figures = train_preferences(policy, rows, scratch, config)
    out.print(
        f"{output}: {figures.rows} rows, {figures.updates} updates, loss "
        f"{figures.first_loss:.3f} → {figures.last_loss:.3f}"
    )


def _examples(
    data: Path | None,
    policy: Path,
    store: str,
    selection: Selection,
    left_out: Counter[str],
    taken: dict[str, Conservation],
) -> list[SftExample]:
    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.trainer.sft.data import (
        examples_from_jsonl,
        examples_from_parquet,
        examples_from_store,
        is_parquet,
    )

    if data is not None:
        if is_parquet(data):
            return examples_from_parquet(data)
        return examples_from_jsonl(data, Tokenizer(policy), left_out)
    with reader(store) as source:
        require_run(source, selection.run)
        return examples_from_store(source, selection, left_out, taken)
