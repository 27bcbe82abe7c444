"""Test that collectors read the figures that the library's own metrics would give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

from bridle.proxy.recording.metrics import SECONDS, DurationHistogram


@pytest.mark.parametrize(
    "observed", [[], [0.0], [SECONDS[0], SECONDS[-1]], [0.0011, 0.3, 7.0, 301.0, 1e9], [-0.5]]
)
def test_times_are_the_librarys_histogram(observed: list[float]) -> None:
    registry = CollectorRegistry()
    ours = DurationHistogram("ours", "seconds", registry)
    library = Histogram("library", "seconds", buckets=SECONDS, registry=None)
    for seconds in observed:
        ours.observe(seconds)
        library.observe(seconds)
    (mine,), (theirs,) = registry.collect(), library.collect()
    assert told(mine.samples) == pytest.approx(told(theirs.samples))
    assert mine.type == theirs.type == "histogram"
    assert told(mine.samples)["sum", ""] == pytest.approx(sum(observed))


def told(samples: Sequence[Sample]) -> dict[tuple[str, str], float]:
    return {
        (sample.name.partition("_")[2], sample.labels.get("le", "")): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }
