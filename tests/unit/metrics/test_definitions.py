"""A metric is found by its names, whatever its unit and wherever it is stored."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.metrics.definitions import HIGHER, LOWER, METRICS, TOKENS_PER_S, Metric, figure, names, over_slo
from kvbench.metrics.latency import summarise
from kvbench.runs.metric_names import unit_of, value_of, values_of
from kvbench.runs.results import CacheCounts
from tests.support.request_rows import frame, row

STREAM = Metric(
    "stream", "stream_bytes", "bytes", LOWER, "bytes of a stream", "stream", ("p95",),
    samples=lambda rows: np.full(len(rows), 512.0), of_request=lambda rows: np.full(len(rows), 512.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "path", "title"),
    [
        ("p95_ttft_ms", "ttft_ms.p95", "p95 TTFT"),
        ("ttft_ms.p95", "ttft_ms.p95", "p95 TTFT"),
        ("median_tpot_ms", "tpot_ms.p50", "p50 TPOT"),
        ("steady_p95_itl_ms", "steady_latency.itl_ms.p95", "p95 ITL"),
        ("steady_latency.itl_ms.p95", "steady_latency.itl_ms.p95", "p95 ITL"),
        ("steady_output_throughput", "steady_output_throughput", "output tokens/s"),
        (TOKENS_PER_S, "output_throughput", "output tokens/s"),
        ("num_preemptions", "server.num_preemptions_total", "preemptions"),
    ],
)
def test_names_lead_to_where_a_figure_is_stored(name, path, title):
    assert (figure(name).path, figure(name).title) == (path, title)


@pytest.mark.parametrize("name", ["p95_ttfd_ms", "p97_ttft_ms", "steady_completed", "ttft", "steady_", ""])
def test_a_misspelt_name_is_refused(name):
    with pytest.raises(ValueError, match="is not a metric"):
        figure(name)


def test_every_name_that_is_offered_is_taken():
    assert [figure(name) for name in names()] and len(set(names())) == len(names())
    assert figure("output_throughput").higher_is_better and not figure("p95_ttft_ms").higher_is_better
    assert METRICS["goodput"].better == HIGHER


def test_an_added_metric_in_bytes_is_measured_named_and_limited(monkeypatch):
    monkeypatch.setitem(METRICS, "stream", STREAM)
    metrics = summarise(frame(row(), row()), {"mode": "closed", "concurrency": 1})
    assert metrics.distribution("stream_bytes").p95 == 512 and figure("p95_stream_bytes").path == "stream_bytes.p95"
    assert value_of(values_of(metrics, {}, CacheCounts()), "p95_stream_bytes") == 512
    assert unit_of("p95_stream_bytes") == "bytes" and figure("p95_stream_bytes").text(512) == "512 B"
    assert over_slo(frame(row()), {"stream_bytes": 511.0})["stream_bytes"].tolist() == [True]
    assert over_slo(frame(row()), {"stream_bytes": 512.0})["stream_bytes"].tolist() == [False]


def test_a_unit_that_no_table_can_write_is_refused():
    with pytest.raises(ValueError, match="parsecs"):
        Metric("far", "far", "parsecs", LOWER, "far", "far")
