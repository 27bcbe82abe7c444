"""``bridle bench``: commands that measure again the figures in the documentation."""

from __future__ import annotations

import typer

from bridle.bench.commands import algorithms as bench_algorithms
from bridle.bench.commands import collect as bench_collect
from bridle.bench.commands import containers as bench_containers
from bridle.bench.commands import continuation as bench_continuation
from bridle.bench.commands import harnesses as bench_harnesses
from bridle.bench.commands import learning as bench_learning
from bridle.bench.commands import matrix as bench_matrix
from bridle.bench.commands import models as bench_models
from bridle.bench.commands import pages as bench_pages
from bridle.bench.commands import path as bench_path
from bridle.bench.commands import proxy as bench_proxy
from bridle.bench.commands import re_entry as bench_re_entry
from bridle.bench.commands import rivals as bench_rivals
from bridle.bench.commands import staleness as bench_staleness
from bridle.bench.commands import store as bench_store
from bridle.bench.commands import train as bench_train
from bridle.bench.commands import viewer as bench_viewer
from bridle.bench.commands import vllm as bench_vllm
from bridle.cli.serving import leave_on_sigterm

app = typer.Typer(help="Measure.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what Bridle costs on this machine."""
    leave_on_sigterm()


app.command("algorithms")(bench_algorithms.algorithms)
app.command("collect")(bench_collect.collect)
app.command("containers")(bench_containers.containers)
app.command("continuation")(bench_continuation.continuation)
app.command("harnesses")(bench_harnesses.harnesses)
app.command("learning")(bench_learning.learning)
app.command("matrix")(bench_matrix.matrix)
app.command("models")(bench_models.models)
app.command("pages")(bench_pages.pages)
app.command("path")(bench_path.path)
app.command("proxy")(bench_proxy.proxy)
app.command("re-entry")(bench_re_entry.re_entry)
app.command("reconstruct")(bench_store.reconstruct)
app.command("rivals")(bench_rivals.rivals)
app.command("staleness")(bench_staleness.staleness)
app.command("store")(bench_store.store)
app.command("train")(bench_train.train)
app.command("viewer")(bench_viewer.viewer)
app.command("vllm")(bench_vllm.vllm)
