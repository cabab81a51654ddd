"""Stored loads in the formats of others: vLLM's result file, llm-d's Benchmark Report, Prometheus, OTLP, MLflow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.export.loads import ExportedLoad, quantiles
from kvbench.metrics.rows import stored

_ASKED = ("backend", "model_id", "tokenizer_id", "request_rate", "burstiness", "max_concurrency")
_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_LLMD_LATENCIES = {
    "ttft": ("time_to_first_token", "s"), "tpot": ("time_per_output_token", "s/token"),
    "itl": ("inter_token_latency", "s/token"), "e2el": ("request_latency", "s"),
}  # fmt: skip
_LLMD_QUANTILES = {
    "p0p1": 0.001, "p1": 0.01, "p5": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95,
    "p99": 0.99, "p99p9": 0.999,
}  # fmt: skip
# Names, descriptions and boundaries [s] of OpenTelemetry's semantic conventions for generative AI.
_OTEL = {
    "ttft": (
        "gen_ai.server.time_to_first_token",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    "tpot": (
        "gen_ai.server.time_per_output_token",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "e2el": (
        "gen_ai.client.operation.duration",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
}


def vllm(load: ExportedLoad, *, detailed: bool = False) -> dict[str, Any]:
    """The file of ``vllm bench serve --save-result`` of vLLM 0.32; ``detailed``: of --save-detailed."""
    metrics, asked = load.result.metrics, {name: load.fields.get(name) for name in _ASKED}
    peak_tokens, peak_requests = _peaks(load)
    backend = "openai-chat" if load.result.endpoint == "chat" else "openai"
    report: dict[str, Any] = {
        "date": load.ended.astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": load.name,
        **({"kvbench_invalid": load.invalid} if load.invalid else {}),  # as --metadata writes a word of the user's
        **{name: asked[name] for name in ("model_id", "tokenizer_id")},
        "num_prompts": len(load.rows),
        **{name: asked[name] for name in ("request_rate", "burstiness", "max_concurrency")},
        "duration": metrics.duration_s,
        "completed": int(load.ok.sum()),
        "failed": int((~load.ok).sum()),
        "total_input_tokens": load.prompt_tokens,
        "total_output_tokens": int(load.tokens.sum()),
    }
    report["burstiness"] = report["burstiness"] if isinstance(report["burstiness"], int | float) else 1.0
    report |= {
        "request_throughput": load.rates["requests"],
        "request_goodput": metrics.goodput,
        "output_throughput": load.rates["output"],
        "total_token_throughput": load.rates["tokens"],
    }
    if detailed:
        report |= {
            "input_lens": load.rows["prompt_tokens"].tolist(),
            "output_lens": load.tokens.tolist(),
            "ttfts": load.ttft.tolist(),
            "itls": [gaps.tolist() for gaps in load.gaps],
            "start_times": load.start.tolist(),
            "generated_texts": [text or "" for text in load.rows.get("text", [""] * len(load.rows))],
            "errors": ["" if ok else error or "failed" for ok, error in zip(load.ok, load.rows["error"], strict=True)],
        }
    report |= {
        "latencies": load.latency.tolist(),
        "queue_times": np.nan_to_num(stored(load.rows, "queued_s")).tolist(),
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,
    }
    for name, samples in load.latencies.items():
        figures = (
            (samples.mean(), np.median(samples), samples.std(), *quantiles(samples, (0.99,)))
            if len(samples)
            else (0.0,) * 4
        )
        report |= dict(
            zip((f"{s}_{name}_ms" for s in ("mean", "median", "std", "p99")), (f * 1e3 for f in figures), strict=True)
        )
    return report


def _peaks(load: ExportedLoad) -> tuple[float, int]:
    """The most chunks and requests in a second, counted as vLLM does: from the first sending on."""
    if not load.ok.any():
        return 0.0, 0
    zero = load.start[load.ok].min()
    chunks: dict[int, int] = {}
    requests: dict[int, int] = {}
    for start, ttft, latency, gaps, ok in zip(load.start, load.ttft, load.latency, load.gaps, load.ok, strict=True):
        if not ok:
            continue
        for moment in start - zero + ttft + np.concatenate([[0.0], np.cumsum(gaps)]):
            chunks[int(moment)] = chunks.get(int(moment), 0) + 1
        for second in range(int(start - zero), int(start - zero + latency) + 1):
            requests[second] = requests.get(second, 0) + 1
    return float(max(chunks.values())), max(requests.values())


def llmd(load: ExportedLoad) -> dict[str, Any]:
    """The Benchmark Report 0.2 of llm-d (schema 0.2.1)."""
    began, ended, rows, ok = load.began, load.ended, load.rows, load.ok
    rate, concurrency = load.fields.get("request_rate"), load.fields.get("max_concurrency")
    rates = {
        "request_rate": (load.rates["requests"], "queries/s"),
        "output_token_rate": (load.rates["output"], "tokens/s"),
        "total_token_rate": (load.rates["tokens"], "tokens/s"),
    }
    asked = {"rate_qps": rate} if isinstance(rate, int | float) else {}
    asked |= {"concurrency": concurrency} if concurrency else {}
    lengths = {"input_length": rows["prompt_tokens"][ok], "output_length": load.tokens[ok]}
    return {
        "version": "0.2.1",
        "run": {
            "uid": f"{load.workload}-{load.name}-{began:%Y%m%dT%H%M%SZ}",
            **({"description": f"INVALID, not to be compared: {load.invalid}"} if load.invalid else {}),
            "time": {
                "start": began.isoformat(), "end": ended.isoformat(),
                "duration": f"PT{(ended - began).total_seconds():.3f}S",
            },
        },
        "scenario": {
            "stack": [{
                "metadata": {"label": "server", "cfg_id": load.cell},
                "standardized": {
                    "kind": "generic", "tool": load.fields.get("backend") or "unknown",
                    "tool_version": load.version,
                },
                "native": {"args": {}, "envars": {}, "config": load.settings},
            }],
            "load": {
                "metadata": {"cfg_id": load.cell},
                "standardized": {
                    "tool": "kvbench", "tool_version": load.version, **asked,
                    "source": "unknown",
                    **{
                        name: {"distribution": "other", "value": float(np.mean(values)) if len(values) else 0.0}
                        for name, values in zip(("input_seq_len", "output_seq_len"), lengths.values(), strict=True)
                    },
                },
                "native": {"args": {}, "envars": {}, "config": {}},
            },
        },
        "results": {"request_performance": {"aggregate": {
            "requests": {
                "total": len(rows), "failures": int((~ok).sum()), "incomplete": 0,
                **{name: _statistics(np.asarray(values, dtype=float), "count") for name, values in lengths.items()},
            },
            "latency": {
                title: _statistics(samples, unit)
                for name, samples in load.latencies.items() if len(samples) for title, unit in [_LLMD_LATENCIES[name]]
            },
            "throughput": {
                name: {"units": unit, "mean": mean} for name, (mean, unit) in rates.items()
            },
        }}},
    }  # fmt: skip


def _statistics(samples: np.ndarray, units: str) -> dict[str, Any]:
    if not len(samples):
        return {"units": units, "mean": 0.0}
    figures = dict(zip(_LLMD_QUANTILES, quantiles(samples, tuple(_LLMD_QUANTILES.values())), strict=True))
    ends = {"min": float(samples.min()), "max": float(samples.max())}
    return {"units": units, "mean": float(samples.mean()), "stddev": float(samples.std()), **ends, **figures}


def prometheus(loads: Sequence[ExportedLoad]) -> str:
    """The text format of Prometheus: a summary of each latency, and gauges, with a label set for each load."""
    lines = []
    for name in ("ttft", "tpot", "itl", "e2el"):
        lines += [
            f"# HELP kvbench_{name}_seconds {name.upper()} as the client saw it.",
            f"# TYPE kvbench_{name}_seconds summary",
        ]
        for load in loads:
            samples = load.latencies[name]
            for share, value in zip(_QUANTILES, quantiles(samples, _QUANTILES), strict=False):
                lines.append(f"kvbench_{name}_seconds{_labels(load, quantile=share)} {value!r}")
            lines.append(f"kvbench_{name}_seconds_sum{_labels(load)} {float(samples.sum())!r}")
            lines.append(f"kvbench_{name}_seconds_count{_labels(load)} {len(samples)}")
    for name, text in (
        ("output_tokens_per_second", "Output tokens of successful requests, over the whole run."),
        ("requests_per_second", "Successful requests, over the whole run."),
        ("requests", "Requests that were sent, by their outcome."),
        ("valid", "Whether the load may be compared: 1 or 0."),
    ):
        lines += [f"# HELP kvbench_{name} {text}", f"# TYPE kvbench_{name} gauge"]
        for load in loads:
            lines += [f"kvbench_{name}{labels} {value!r}" for labels, value in _gauges(load, name)]
    return "\n".join(lines) + "\n"


def _gauges(load: ExportedLoad, name: str) -> Iterator[tuple[str, float]]:
    if name == "requests":
        yield _labels(load, outcome="ok"), int(load.ok.sum())
        yield _labels(load, outcome="failed"), int((~load.ok).sum())
    else:
        values = {
            "output_tokens_per_second": load.rates["output"],
            "requests_per_second": load.rates["requests"],
            "valid": int(load.result.valid),
        }
        yield _labels(load), values[name]


def _labels(load: ExportedLoad, **more: object) -> str:
    labels = {"workload": load.workload, "cell": load.cell, "repeat": load.repeat, **more}
    escaped = {
        name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def otlp(loads: Sequence[ExportedLoad]) -> dict[str, Any]:
    """An export request of OTLP in JSON: histograms by OpenTelemetry's names, with a point for each load."""
    metrics = []
    for name, (title, bounds) in _OTEL.items():
        points = [_histogram(load, load.latencies[name], bounds) for load in loads]
        histogram = {"aggregationTemporality": 1, "dataPoints": points}  # delta: each load begins anew
        metrics.append({"name": title, "unit": "s", "histogram": histogram})
    scope = {"name": "kvbench", "version": loads[0].version}
    resource = {"attributes": [_attribute("service.name", "kvbench")]}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [{"scope": scope, "metrics": metrics}]}]}


def _histogram(load: ExportedLoad, samples: np.ndarray, bounds: Sequence[float]) -> dict[str, Any]:
    # A bucket holds what is above its lower and at most its upper bound.
    counts = np.bincount(np.searchsorted(bounds, samples, side="left"), minlength=len(bounds) + 1)
    names = {
        "gen_ai.request.model": load.fields.get("model_id") or "", "kvbench.workload": load.workload,
        "kvbench.cell": load.cell, "kvbench.repeat": str(load.repeat), "kvbench.invalid": load.invalid,
    }  # fmt: skip
    ends = {"min": float(samples.min()), "max": float(samples.max())} if len(samples) else {}
    return {
        "startTimeUnixNano": str(int(load.began.timestamp() * 1e9)),
        "timeUnixNano": str(int(load.ended.timestamp() * 1e9)),
        "count": str(len(samples)),
        "sum": float(samples.sum()),
        **ends,
        "bucketCounts": [str(count) for count in counts],
        "explicitBounds": list(bounds),
        "attributes": [_attribute(name, value) for name, value in names.items()],
    }


def _attribute(name: str, value: str) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value}}


def to_mlflow(loads: Sequence[ExportedLoad]) -> int:
    """Logs a run of MLflow for each load, where MLFLOW_TRACKING_URI says. Raises UsageError without MLflow."""
    try:
        import mlflow
    except ImportError:
        raise UsageError("--as mlflow needs MLflow: pip install mlflow-skinny") from None
    try:
        _log(mlflow, loads)
    except OSError as error:
        raise MeasurementError(f"MLflow could not be written to: {error.strerror or error}") from None
    except Exception as error:  # MLflow's own, which are of no class that can be named without it
        if type(error).__module__.partition(".")[0] != "mlflow":
            raise
        raise MeasurementError(f"MLflow refused: {str(error).splitlines()[0]}") from None
    return len(loads)


def _log(mlflow: Any, loads: Sequence[ExportedLoad]) -> None:
    for load in loads:
        with mlflow.start_run(run_name=f"{load.workload}/{load.name}"):
            settings = {name: load.fields[name] for name in _ASKED if load.fields.get(name) is not None}
            names = {"workload": load.workload, "cell": load.cell, "repeat": load.repeat}
            mlflow.log_params(settings | names | ({"invalid": load.invalid} if load.invalid else {}))
            report = vllm(load)
            numbers = {k: v for k, v in report.items() if isinstance(v, int | float) and math.isfinite(v)}
            mlflow.log_metrics({name: float(value) for name, value in numbers.items() if name not in _ASKED})
