"""``bridle demo``: from nothing to a better agent, in minutes."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from bridle.cli.options import EngineOption, JsonOption, ProxyOption, StoreOption, base_urls
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra
from bridle.recipes.demo import DemoPolicy


def demo(
    proxy: ProxyOption,
    store: StoreOption,
    out_dir: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option(help="Delete an earlier run in the folder first.")] = False,
    start_from: Annotated[
        Path | None, typer.Option(help="Start from the fine-tuned policy of this earlier run.")
    ] = None,
    policy: Annotated[
        DemoPolicy,
        typer.Option(
            help="smollm2: the pretrained SmolLM2-135M-Instruct, from the Python package index. "
            "tiny: random weights, and an agent with tools; needs no download."
        ),
    ] = "smollm2",
    seed: Annotated[
        int, typer.Option(help="Seed of the policy, the questions and their order.")
    ] = 0,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Learning rate of GRPO; 0 changes nothing.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Largest number of GRPO steps.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Longest time of the whole run; measurements that have begun are completed."
        ),
    ] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Questions per GRPO step.")] = None,
    eval_tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks; at most 100 of them greedily.")
    ] = None,
    engine: EngineOption = "embedded",
    device: Annotated[
        str, typer.Option(help="Of the trainer and the embedded engine: cpu, cuda, cuda:1.")
    ] = "cpu",
    engine_url: Annotated[
        str | None,
        typer.Option(
            callback=base_urls,
            help="An engine that runs already and can read --out: it serves, and the running "
            "--proxy records to --store.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Workspaces of sessions, with --engine-url; else in --out.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train the model of a small LangChain agent end to end, and plot its reward."""
    with needs_extra("train", "the demo needs the training extra"):
        from bridle.recipes.demo.run import Demo, Services
    from bridle.recipes.demo.settings import VLLM_MINUTES, settings_of
    from bridle.recipes.demo.state import start_afresh
    from bridle.recipes.models.smollm2 import ModelNotFetched

    if any(find_spec(name) is None for name in ("langchain", "langchain_openai")):
        fail("the demo's agent is a LangChain app: pip install langchain langchain-openai")

    if engine == "vllm" and minutes is None:
        minutes = VLLM_MINUTES
    leave_on_sigterm()
    if fresh:
        start_afresh(out_dir)
    asked: dict[str, Any] = {
        "seed": seed,
        "engine": engine,
        "device": device,
        "learning_rate": learning_rate,
        "max_steps": steps,
        "minutes": minutes,
        "groups": groups,
        "eval_tasks": eval_tasks,
    }
    settings = dataclasses.replace(
        settings_of(policy), **{name: value for name, value in asked.items() if value is not None}
    )
    services = None if engine_url is None else Services(engine_url, proxy, store, directory)
    run = Demo(out_dir, settings, err if json else out, services=services)
    if start_from is not None:
        run.start_from(start_from)
    if run.finished:
        report = orjson.loads((out_dir / "report.json").read_bytes())
        run.show(report)
        (err if json else out).print("This run is finished; --fresh starts a new one.")
    else:
        try:
            report = run.run()
        except ModelNotFetched as error:
            fail(f"{error}; `bridle demo --policy tiny` needs no download")
        except KeyboardInterrupt:
            err.print(f"\nStopped. The same command resumes; the store is in {out_dir}.")
            raise typer.Exit(130) from None
    if json:
        print_json(report)
