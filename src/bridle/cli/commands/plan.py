"""``bridle plan``: estimate what a number of sessions an hour needs."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bridle.cli.options import JsonOption, StoreOption, model_path
from bridle.cli.reading import reader
from bridle.cli.settings import settable
from bridle.cli.terminal import err, out, print_json
from bridle.errors import UsageError
from bridle.run.settings import SettingsError, parse_overrides, settings_from

if TYPE_CHECKING:
    from bridle.run.plan.device import Device
    from bridle.run.plan.workload import RecordedRun, Workload

_BUSY: Final = 0.5
"""The average share of time for which a proxy process may be busy; sessions come in bursts."""
_ASSUMED: Final = 0.4
"""The share of the roofline that is assumed if no run was measured."""

WorkloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A mean over the sessions: turns, prompt (tokens of the first one), added (tokens of "
        "tool results before each later turn), sampled (tokens of a reply), shared (tokens of the "
        "first prompt that all have in common). Repeatable; of a run, its own.",
    ),
]


@settable("bridle.run.plan.workload:Workload")
def plan(
    store: StoreOption,
    model: Annotated[
        Path,
        typer.Option(parser=model_path, metavar="MODEL", help="Directory or Hub name."),
    ],
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A recorded run: its shape, and how fast its engine was."
        ),
    ] = None,
    sessions_per_hour: Annotated[
        float | None, typer.Option(min=0.001, help="Wanted; of a run, its own.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="this, which is measured, or a100, l40s, h100, h200, b200."),
    ] = "this",
    parallel: Annotated[
        float | None, typer.Option(min=1, help="Sessions at a time in an engine; 64, or the run's.")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1, help=f"Share of the roofline reached; {_ASSUMED}, or the run's."
        ),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Only adapters are trained.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Sessions are scored for a KL penalty too.")
    ] = False,
    assignments: WorkloadOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate the hardware for a number of sessions per hour.

    The proxy's cost is measured here for some seconds. Engines and trainers come from the model's
    sizes and the device's rates.
    """
    from bridle.run.plan.cost import recording_cost
    from bridle.run.plan.database import database
    from bridle.run.plan.estimate import engines, trainers
    from bridle.run.plan.model import model_size
    from bridle.run.plan.workload import recorded_run

    measured: RecordedRun | None = None
    if run is not None:
        with reader(store) as source:
            measured = recorded_run(source, run)
    asked = parse_overrides(assignments or ())
    if sessions_per_hour is not None:
        asked["sessions_per_hour"] = str(sessions_per_hour)
    workload = _workload(measured, asked)
    size = model_size(model)
    with err.status("Measuring"):
        machine = _device(device)
        cost = recording_cost(workload, model)
    found: dict[str, Any] = {"workload": asdict(workload)}
    if measured is not None:
        bound = engines(measured.workload, size, machine, measured.parallel)
        reached = bound.seconds_per_session / measured.engine_seconds
        found["run"] = asdict(measured) | {"engine_efficiency": reached}
        if efficiency is None and device == "this":
            efficiency = min(1.0, reached)
    share = efficiency or _ASSUMED
    one = engines(workload, size, machine, parallel or (measured.parallel if measured else 64))
    learning = trainers(workload, size, machine, lora=lora, reference=reference)
    daily = 24 * workload.sessions_per_hour * cost.bytes_per_session
    processes = max(1, ceil(workload.calls_per_s * cost.cpu_s_per_call / _BUSY))
    found |= {
        "calls_per_s": workload.calls_per_s,
        "sampled_tokens_per_s": workload.calls_per_s * workload.sampled,
        "model": asdict(size),
        "device": asdict(machine),
        "efficiency": share,
        "recording": asdict(cost),
        "proxy_processes": processes,
        "store": asdict(database(processes)),
        "disk_bytes_per_day": daily,
        "engines": asdict(one) | {"needed": one.needed(workload, share)},
        "trainers": asdict(learning) | {"needed": learning.needed(workload, share)},
    }
    if json:
        print_json(found)
    else:
        _print(found, machine)


def _workload(measured: RecordedRun | None, asked: dict[str, str]) -> Workload:
    from bridle.run.plan.workload import Workload

    recorded = {} if measured is None else asdict(measured.workload)
    try:
        return settings_from(Workload, defaults=recorded, overrides=asked)
    except SettingsError as error:
        if measured is None:
            error.add_note("name a recorded RUN, or give every mean of its sessions")
        raise


def _device(name: str) -> Device:
    from bridle.run.plan.device import DATA_SHEETS, this_machine

    if name == "this":
        return this_machine()
    if name not in DATA_SHEETS:
        raise UsageError(f"--device {name} is none of this, {', '.join(DATA_SHEETS)}")
    return DATA_SHEETS[name]


def _store_line(store: dict[str, Any]) -> str:
    if not store["connections"]:
        return f"{store['name']}, a file of this one process"
    return (
        f"{store['name']}: {store['connections']} connections, and up to "
        f"{store['idle_transactions_per_s']:.1f} transactions/s while no call runs; `bridle bench "
        "store --postgresql URL` measures the calls/s that one server records"
    )


def _print(found: dict[str, Any], machine: Device) -> None:
    work, size, cost = found["workload"], found["model"], found["recording"]
    one, learning = found["engines"], found["trainers"]
    processes, store = found["proxy_processes"], found["store"]
    lines = [
        f"{work['sessions_per_hour']:.0f} sessions/h of {work['turns']:.1f} turns: "
        f"{found['calls_per_s']:.2f} calls/s, {found['sampled_tokens_per_s']:.0f} sampled tokens/s",
        f"model      {size['parameters'] / 1e9:.3f} B parameters, {size['weight_bytes'] / 1e9:.2f} "
        f"GB; {2 * size['cache_elements'] / 1e3:.1f} kB of cache a token in 16 bits",
        f"device     {machine.name}: {machine.memory / 1e9:.0f} GB, {machine.flops / 1e12:.2f} "
        f"TFLOP/s, {machine.bandwidth / 1e9:.0f} GB/s; {found['efficiency']:.1%} of that reached",
        f"proxies    {processes} (processor time {1000 * cost['cpu_s_per_call']:.2f} ms a call, "
        f"measured in {cost['sessions']} sessions)",
        f"store      {_store_line(store)}",
        f"disk       {found['disk_bytes_per_day'] / 1e9:.2f} GB a day "
        f"({cost['bytes_per_session'] / 1e3:.1f} kB a session)",
        f"engines    {one['needed']} of {one['devices_per_engine']} device(s), "
        f"{one['parallel']} sessions at a time each",
        f"trainers   {learning['needed']} device(s); weights, gradients and optimizer take "
        f"{learning['state_bytes'] / 1e9:.1f} GB",
    ]
    if run := found.get("run"):
        lines.append(
            f"the run    {run['sessions']} sessions; its engine was busy for "
            f"{run['engine_seconds']:.2f} s each, and reached {run['engine_efficiency']:.1%} of "
            f"{machine.name}"
        )
    for line in lines:
        out.print(line)
