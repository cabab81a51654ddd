"""``kvbench export``: every format as its consumer's own code reads it, of a run that was measured.

llmd-benchmark-report has llm-d's schema and the importer of vLLM's result files; prometheus_client and
opentelemetry-proto have the parsers.
"""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pandas as pd
import pytest

from kvbench.audit.readers import read_results
from kvbench.cli import main as cli
from kvbench.common.files import read_json
from kvbench.export.loads import read_loads
from tests.support.decisions import unpack_run

CELL = "paged-p16-c3"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return unpack_run(tmp_path_factory.mktemp("export"))


@pytest.fixture
def export(run, tmp_path, capfd):
    """Exports the run into tmp_path/out; the folder, or the exit code and output where it fails."""

    def command(form, *words, code=0):
        with pytest.raises(SystemExit) as left:
            cli.main(["export", str(run), "--as", form, "--to", str(tmp_path / "out"), *words])
        said = "".join(capfd.readouterr())
        assert left.value.code == code, said
        return tmp_path / "out" if not code else said

    return command


def rows_of(run, repeat=1):
    return pd.read_parquet(run / "cells" / CELL / "loads" / str(repeat) / "requests.parquet")


def test_a_file_of_vllm_holds_its_figures_by_its_definitions(run, export):
    folder = export("vllm", "--detailed")
    loads = read_loads(run)
    assert len(list(folder.glob("vllm-*.json"))) == len(loads) == 6
    report, rows = read_json(folder / f"vllm-{CELL}-1.json"), rows_of(run)
    ok = rows[rows["ok"]]
    gaps = np.concatenate([np.diff(times) for times in ok["chunk_times"]])
    tpot = (ok["last"] - ok["first"]) / (ok["output_tokens"] - 1)
    assert report["completed"] == len(ok) and report["failed"] == len(rows) - len(ok)
    assert report["mean_itl_ms"] == pytest.approx(gaps.mean() * 1e3)
    assert report["p99_ttft_ms"] == pytest.approx(np.quantile(ok["first"] - ok["ts"], 0.99) * 1e3)
    assert report["mean_tpot_ms"] == pytest.approx(tpot.mean() * 1e3)
    assert report["output_throughput"] == pytest.approx(ok["output_tokens"].sum() / report["duration"])
    assert report["std_e2el_ms"] == pytest.approx((ok["last"] - ok["ts"]).std(ddof=0) * 1e3)
    assert len(report["date"]) == 15 and report["date"][8] == "-"
    arrays = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors", "latencies")
    assert {len(report[name]) for name in (*arrays, "queue_times")} == {len(rows)}
    seconds = np.concatenate([times - ok["ts"].min() for times in ok["chunk_times"]]).astype(int)
    assert report["max_output_tokens_per_s"] == np.bincount(seconds).max()
    assert "itls" not in read_json(export("vllm") / f"vllm-{CELL}-1.json")


def test_a_failed_request_is_written_as_vllm_writes_it(run, export, tmp_path):
    load = run / "cells" / CELL / "loads" / "1"
    before = (load / "requests.parquet").read_bytes()
    try:
        rows = rows_of(run)
        rows.loc[2, ["ok", "error", "last"]] = [False, "the server answered 500", None]
        rows.to_parquet(load / "requests.parquet")
        report = read_json(export("vllm", "--detailed") / f"vllm-{CELL}-1.json")
    finally:
        (load / "requests.parquet").write_bytes(before)
    assert report["failed"] == 1 and report["errors"][2] == "the server answered 500"
    assert report["latencies"][2] == 0.0 and report["output_lens"][2] == 0
    assert [error for i, error in enumerate(report["errors"]) if i != 2] == [""] * (len(report["errors"]) - 1)


def test_an_invalid_load_is_marked_in_every_format(run, export):
    done = run / "cells" / CELL / "loads" / "1" / "done.json"
    before = done.read_text()
    try:
        reasons = {"valid": False, "invalid_reasons": ["other processes used 1.92 of a core"]}
        done.write_text(json.dumps(json.loads(before) | reasons))
        marked = [f"vllm-{CELL}-1.json", f"llm-d-{CELL}-1.json", "metrics-otlp.json"]
        for form, name in zip(("vllm", "llm-d", "otlp"), marked, strict=True):
            assert "1.92 of a core" in (export(form) / name).read_text()
        text = (export("prometheus") / "metrics.prom").read_text()
        assert text.count("kvbench_valid{") == 6 and any(
            line.startswith("kvbench_valid") and f'cell="{CELL}",repeat="1"' in line and line.endswith(" 0")
            for line in text.splitlines()
        )
    finally:
        done.write_text(before)


def test_the_audit_reads_what_is_exported(run, export):
    (result,) = read_results(export("vllm", "--detailed") / f"vllm-{CELL}-1.json")
    (report,) = read_results(export("llm-d") / f"llm-d-{CELL}-1.json")
    for latency in ("ttft", "tpot", "e2el"):
        assert report.figure(latency) == pytest.approx(result.figure(latency))
    assert result.asked.concurrency == report.asked.concurrency == 3
    assert result.completed == report.completed == len(rows_of(run))


def test_llmd_reads_its_report_and_converts_that_of_vllm(export, tmp_path):
    core = pytest.importorskip("llmd_benchmark_report.core")
    report = core.load_benchmark_report(read_json(export("llm-d") / f"llm-d-{CELL}-1.json"))
    latency = report.results.request_performance.aggregate.latency
    source = export("vllm") / f"vllm-{CELL}-1.json"
    converters = pytest.importorskip("llmd_benchmark_report.native_to_br0_2")
    converted = core.load_benchmark_report(converters.import_vllm_benchmark(str(source)).model_dump(mode="json"))
    theirs = converted.results.request_performance.aggregate.latency
    assert theirs.time_to_first_token.mean == pytest.approx(latency.time_to_first_token.mean * 1e3)
    assert theirs.time_per_output_token.mean == pytest.approx(latency.time_per_output_token.mean * 1e3)


def test_prometheus_parses_its_text(run, export):
    parser = pytest.importorskip("prometheus_client.parser")
    text = (export("prometheus") / "metrics.prom").read_text()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["kvbench_ttft_seconds"].type == "summary"
    samples = [
        s for s in families["kvbench_ttft_seconds"].samples if s.labels["cell"] == CELL and s.labels["repeat"] == "1"
    ]
    values = {(s.name, s.labels.get("quantile")): s.value for s in samples}
    ttfts = rows_of(run)["first"] - rows_of(run)["ts"]
    assert values["kvbench_ttft_seconds", "0.95"] == pytest.approx(np.quantile(ttfts, 0.95))
    assert values["kvbench_ttft_seconds_count", None] == len(ttfts)
    assert values["kvbench_ttft_seconds_sum", None] == pytest.approx(ttfts.sum())
    assert len({tuple(sorted(s.labels.items())) for s in families["kvbench_valid"].samples}) == 6
    assert sum(s.value for s in families["kvbench_requests"].samples if s.labels["outcome"] == "failed") == 0


def test_opentelemetry_parses_its_export_request(run, export):
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    from google.protobuf import json_format

    text = (export("otlp") / "metrics-otlp.json").read_text()
    request = json_format.Parse(text, service.ExportMetricsServiceRequest())
    metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
    points = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    attributes = [{a.key: a.value.string_value for a in point.attributes} for point in points]
    at = next(
        i for i, names in enumerate(attributes) if (names["kvbench.cell"], names["kvbench.repeat"]) == (CELL, "1")
    )
    point, ttfts = points[at], rows_of(run)["first"] - rows_of(run)["ts"]
    assert point.count == sum(point.bucket_counts) == len(ttfts) and point.sum == pytest.approx(ttfts.sum())
    below = sum(point.bucket_counts[: list(point.explicit_bounds).index(0.1) + 1])
    assert below == (ttfts <= 0.1).sum() and len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert point.start_time_unix_nano < point.time_unix_nano


def test_mlflow_gets_a_run_for_each_load(run, export, monkeypatch):
    logged = []

    class Started:
        def __init__(self, run_name):
            logged.append({"name": run_name})

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            return None

    module = types.SimpleNamespace(
        start_run=Started,
        log_params=lambda params: logged[-1].update(params=params),
        log_metrics=lambda metrics: logged[-1].update(metrics=metrics),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    export("mlflow")
    assert len(logged) == 6 and len({entry["name"] for entry in logged}) == 6
    entry = next(e for e in logged if e["params"]["cell"] == CELL and e["params"]["repeat"] == 1)
    assert entry["params"]["max_concurrency"] == 3
    assert entry["metrics"]["mean_ttft_ms"] > 0 and all(isinstance(v, float) for v in entry["metrics"].values())
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "mlflow-skinny" in export("mlflow", code=2)


def test_what_is_no_run_or_no_option_of_the_format_is_said(export, run, tmp_path, capfd):
    assert "--detailed" in export("otlp", "--detailed", code=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as left:
        cli.main(["export", str(tmp_path / "empty"), "--as", "vllm"])
    assert left.value.code == 2 and "empty" in capfd.readouterr().err
    json.loads((export("otlp") / "metrics-otlp.json").read_text())
