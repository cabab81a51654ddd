"""Readers of other tools' result files, which are recognised by their content.

The formats were read off files of vLLM 0.32, SGLang 0.5.23, GuideLLM 0.8.1, AIPerf 0.13 and inference-perf 0.7, made
against a server with known times, and off the sources of InferenceX and of llm-d's Benchmark Report 0.2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from kvbench.audit.result import E2EL, GAP, TPOT, TTFT, Asked, AuditedRequest, AuditedResult, Statistics
from kvbench.audit.sentences import say
from kvbench.common.errors import UsageError
from kvbench.common.parsing import json_at, read_yaml

_MOST_BYTES = 1 << 30
_SUFFIXES = (".json", ".jsonl", ".yaml", ".yml")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_SPELLED = {"avg": "mean", "median": "p50"}


def read_results(path: Path) -> list[AuditedResult]:
    """Reads every result of a file, or of all files below a folder. Raises UsageError where there is none."""
    if not path.exists():
        raise UsageError(say("read.missing", path=path))
    if path.is_dir():
        results = [result for file in _result_files(path) for result in _of_file(file, alone=False)]
        if not results:  # a folder of folders
            for folder in sorted(one for one in path.iterdir() if one.is_dir()):
                with suppress(UsageError):
                    results += read_results(folder)
    else:
        results = list(_of_file(path, alone=True))
    if not results:
        raise UsageError(say("read.unknown", path=path, tools=", ".join(tool for tool, _, _ in _FORMATS)))
    return results


def _result_files(folder: Path) -> list[Path]:
    """The files of a folder that may be results, without those that say less than another file beside them."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    names = " ".join(path.name for path in files)
    less = [pattern for more, pattern in _LESS if more in names]
    return [path for path in files if not any(re.search(pattern, path.name) for pattern in less)]


def _of_file(path: Path, *, alone: bool) -> Iterator[AuditedResult]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(say("read.large", path=path, gib=_MOST_BYTES >> 30))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(say("read.unreadable", path=path, error=error)) from None
    try:
        documents = _documents(path, text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        if alone:
            raise UsageError(say("read.damaged", path=path, error=str(error).splitlines()[0])) from None
        return
    for _, fits, read in _FORMATS:
        if documents and fits(documents[0]):
            try:
                yield from read(path, documents)
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                raise UsageError(say("read.strange", path=path, error=f"{type(error).__name__}: {error}")) from None
            return


def _documents(path: Path, text: str) -> list[Any]:
    """The JSON or YAML of a file; of JSON Lines one a line."""
    if path.suffix in (".yaml", ".yml"):
        return [read_yaml(path)]
    try:
        return [json.loads(text)]
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [json.loads(line) for line in lines]


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and all(json_at(data, *key.split(".")) is not None for key in keys)


def _at(data: Any, path: str) -> Any:
    return json_at(data, *path.split("."))


def _number(data: Any, path: str) -> float | None:
    """The finite number at a dotted path, None where there is none."""
    value = _at(data, path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None


def _whole(data: Any, path: str) -> int | None:
    value = _number(data, path)
    return None if value is None else round(value)


def _statistics(data: Any, scale: float = 1.0) -> Statistics:
    """The figures of a distribution by our names; ``scale``: to milliseconds."""
    if not isinstance(data, dict):
        return {}
    flat = {**data, **(data.get("percentiles") or {})}
    named = {_SPELLED.get(name, name): value for name, value in flat.items()}
    return {name: named[name] * scale for name in _STATISTICS if isinstance(named.get(name), int | float)}


def _flat_statistics(data: Mapping[str, Any], name: str, scale: float = 1.0) -> Statistics:
    """The figures of vLLM's and InferenceX's flat files: mean_ttft_ms, p99_ttft_ms."""
    figures = {}
    for key, value in data.items():
        match = re.fullmatch(rf"(mean|median|p\d+)_{name}", key)
        if match and isinstance(value, int | float):
            figures[_SPELLED.get(match[1], match[1])] = value * scale
    return figures


def _latencies(named: Mapping[str, Statistics]) -> dict[str, Statistics]:
    return {name: figures for name, figures in named.items() if any(figures.values())}


# --- vLLM and SGLang


def _read_vllm(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    for number, data in enumerate(documents, 1):
        is_sglang = "total_output_tokens_retokenized" in data
        rate = _number(data, "request_rate")  # "inf" and Infinity are a closed loop's, or all at once
        failed, requests = _whole(data, "failed"), list(_flat_requests(data))
        if failed is None and (asked := _whole(data, "num_prompts")) is not None:  # older versions of vLLM
            failed = asked - data["completed"]
        if is_sglang and requests:
            failed = sum(bool(request.error) for request in requests)
        waits = [wait for wait in data.get("queue_times") or () if isinstance(wait, int | float)]
        counts = []
        if retokenized := _number(data, "total_output_tokens_retokenized"):
            counts.append(("output tokens, re-tokenised", retokenized, float(data["total_output_tokens"])))
        is_random = str(data.get("dataset_name", "")).startswith("random")
        yield AuditedResult(
            tool="SGLang" if is_sglang else "vLLM",
            name=_name(path, number, len(documents)),
            asked=Asked(
                concurrency=_number(data, "max_concurrency") if rate is None else None,
                rate=rate,
                limit=_number(data, "max_concurrency"),
                requests=_whole(data, "num_prompts"),
                input_tokens=_number(data, "random_input_len") if is_random else None,
                output_tokens=_number(data, "random_output_len") if is_random else None,
            ),
            model=data.get("model_id"),
            date=data.get("date"),
            completed=_whole(data, "completed"),
            failed=failed,
            duration_s=_number(data, "duration"),
            requests_per_s=_number(data, "request_throughput"),
            output_tokens_per_s=_number(data, "output_throughput"),
            latencies=_latencies({
                TTFT: _flat_statistics(data, "ttft_ms"),
                TPOT: _flat_statistics(data, "tpot_ms"),
                GAP: _flat_statistics(data, "itl_ms"),
                E2EL: {**_flat_statistics(data, "e2el_ms"), **_flat_statistics(data, "e2e_latency_ms")},
            }),
            titles={TTFT: "ttft_ms", TPOT: "tpot_ms", GAP: "itl_ms"},
            concurrency=_number(data, "concurrency"),
            queue_ms=sum(waits) / len(waits) * 1e3 if waits else None,
            waits_count=rate is not None,
            cached_share=_cache_of_sglang(data),
            peak_tokens_per_s=_number(data, "max_output_tokens_per_s"),
            token_counts=counts,
            requests=requests,
            rerun="--output-details --cache-report" if is_sglang else "--save-detailed",
        )  # fmt: skip


def _cache_of_sglang(data: Any) -> float | None:
    """The cached share of prompt tokens. SGLang's 0 says nothing: it reads its own API alone."""
    total, cached = (_number(data, f"cache_report.total_{kind}_tokens") for kind in ("prompt", "cached"))
    return cached / total if total and cached else None


def _flat_requests(data: Mapping[str, Any]) -> Iterator[AuditedRequest]:
    latencies, ttfts = data.get("latencies") or [], data.get("ttfts") or []
    columns = {name: data.get(name) or [] for name in ("latencies", "ttfts", "output_lens", "errors", "start_times")}
    lengths = {name: len(values) if isinstance(values, list) else -1 for name, values in columns.items() if values}
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise ValueError(f"the lists of its requests have different lengths: {lengths}")
    for i in range(max(len(latencies), len(ttfts))):
        latency = _entry(latencies, i)
        gaps = _entry(data.get("itls"), i)
        error = _entry(data.get("errors"), i) or ""
        if not error and latency == 0:
            error = "it has no latency"  # without details a failed request is told by nothing else
        if latency is None and gaps is not None and i < len(ttfts):
            latency = ttfts[i] + sum(gaps)
        yield AuditedRequest(
            start_s=_entry(data.get("start_times"), i),
            latency_s=latency,
            ttft_s=_entry(ttfts, i),
            gaps_s=gaps,
            chunks=None if gaps is None else len(gaps) + 1,
            input_tokens=_entry(data.get("input_lens"), i),
            output_tokens=_entry(data.get("output_lens"), i),
            error=error,
        )


def _entry(values: Any, i: int) -> Any:
    return values[i] if isinstance(values, list) and i < len(values) else None


# --- GuideLLM


def _read_guidellm(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    (report,) = documents
    spec, benchmarks = _at(report, "config.spec") or {}, report["benchmarks"]
    sizes = next((one for one in spec.get("data") or () if isinstance(one, dict) and "prompt_tokens" in one), {})
    for number, data in enumerate(benchmarks, 1):
        metrics, strategy = data["metrics"], _at(data, "config.strategy") or {}
        made = _at(data, "scheduler_metrics.requests_made") or metrics["request_totals"]
        # A limit of time cuts off what is in flight, which is no failure.
        is_cut = _at(data, "config.constraints.max_duration") is not None
        cut = 0 if is_cut else _whole(made, "incomplete") or 0
        is_chat = "chat" in str(_at(data, "config.backend.request_format"))
        asked = Asked(
            concurrency=_number(strategy, "streams"),
            rate=_number(strategy, "rate"),
            limit=_number(strategy, "max_concurrency"),
            requests=_whole(data, "config.constraints.max_requests.args.count"),
            input_tokens=_number(sizes, "prompt_tokens"),
            output_tokens=_number(sizes, "output_tokens"),
            seed=_whole(spec, "seed.value"),
        )
        named = {
            TTFT: _statistics(_at(metrics, "time_to_first_token_ms.successful")),
            TPOT: _statistics(_at(metrics, "inter_token_latency_ms.successful")),
            E2EL: _statistics(_at(metrics, "request_latency.successful"), 1e3),
        }
        requests = list(_guidellm_requests(data.get("requests") or {}))
        prompts = [r.input_tokens for r in requests if r.input_tokens and not r.error]
        cached = [r.cached_tokens for r in requests if r.cached_tokens is not None and not r.error]
        with_ttft = _number(metrics, "time_per_output_token_ms.successful.mean")
        token = named[TPOT].get("mean")
        counts = []
        if asked.input_tokens and prompts and not sizes.get("prompt_tokens_stdev") and not is_chat:
            counts.append(("prompt tokens a request", asked.input_tokens, sum(prompts) / len(prompts)))
        yield AuditedResult(
            tool="GuideLLM",
            name=_name(path, number, len(benchmarks)),
            asked=asked,
            version=_at(report, "metadata.guidellm_version"),
            model=_at(data, "config.backend.model"),
            # Rates and percentiles are of the window without warm-up and cool-down; failures are of the whole run.
            completed=_whole(metrics, "request_totals.successful"),
            failed=(_whole(made, "errored") or 0) + cut,
            duration_s=_number(data, "duration"),
            requests_per_s=_number(metrics, "requests_per_second.successful.mean"),
            rates_are_means=True,
            output_tokens_per_s=_number(metrics, "output_tokens_per_second.successful.mean"),
            latencies=_latencies(named),
            titles={TTFT: "time_to_first_token_ms", TPOT: "inter_token_latency_ms"},
            concurrency=_number(metrics, "request_concurrency.total.mean"),
            queue_ms=_times(_number(metrics, "request_dispatch_delay.successful.mean"), 1e3),
            waits_count=asked.rate is not None,
            cached_share=sum(cached) / sum(prompts) if cached and prompts else None,
            chunk_tokens=_number(metrics, "output_tokens_per_iteration.successful.mean"),
            token_counts=counts,
            misnamed=("time_per_output_token_ms", with_ttft, "with TTFT in it", token) if with_ttft and token else None,
            requests=requests,
        )


def _guidellm_requests(groups: Mapping[str, Any]) -> Iterator[AuditedRequest]:
    for group in ("successful", "errored", "incomplete"):
        for request in groups.get(group) or ():
            chunks = _whole(request, "info.timings.token_iterations")
            yield AuditedRequest(
                start_s=request.get("request_start_time"),
                latency_s=request.get("request_latency"),
                ttft_s=_times(_number(request, "time_to_first_token_ms"), 1e-3),
                chunks=chunks,
                input_tokens=request.get("prompt_tokens"),
                output_tokens=request.get("output_tokens"),
                cached_tokens=request.get("cached_tokens"),
                error="" if group == "successful" else str(_at(request, "info.error") or group),
            )


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


# --- AIPerf


def _read_aiperf(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    (data,) = documents
    config = data["input_config"]
    phases = [phase for phase in config.get("phases") or () if isinstance(phase, dict)]
    phase = next((one for one in phases if one.get("kind") == "profiling"), config.get("loadgen") or {})
    prompts = next(iter(config.get("datasets") or ()), {}).get("prompts") or {}
    mean = {key: _number(data, f"{key}.avg") for key, value in data.items() if isinstance(value, dict)}
    cached = mean.get("overall_usage_prompt_cache_read_pct")
    seen = mean.get("usage_prompt_tokens"), mean.get("usage_completion_tokens")
    client = mean.get("input_sequence_length"), mean.get("output_sequence_length")
    kinds = ("prompt tokens a request, client and usage", "output tokens a request, client and usage")
    if _at(config, "endpoint.type") == "chat":  # usage counts the template, too
        seen = (None, seen[1])
    counts = [(kind, a, b) for kind, a, b in zip(kinds, client, seen, strict=True) if a and b]
    if (osl := _number(prompts, "osl.mean")) and client[1] and not _number(prompts, "osl.stddev"):
        counts.append(("output tokens a request, asked", osl, client[1]))
    named = {
        TTFT: _statistics(data.get("time_to_first_token")),
        TPOT: _statistics(data.get("inter_token_latency")),
        GAP: _statistics(data.get("inter_chunk_latency")),
        E2EL: _statistics(data.get("request_latency")),
    }
    models = (_at(config, "models.items") or [{}])[0].get("name") or _at(config, "endpoint.model_names")
    failed = mean.get("error_request_count")
    if failed is None and mean.get("request_error_rate") == 0:
        failed = 0.0
    records = path.with_name("profile_export.jsonl")
    lines = _documents(records, records.read_text(encoding="utf-8")) if records.is_file() else []
    yield AuditedResult(
        tool="AIPerf",
        name=_name(path),
        asked=Asked(
            concurrency=_number(phase, "concurrency") if _number(phase, "rate") is None else None,
            rate=_number(phase, "rate"),
            limit=_number(phase, "concurrency"),
            requests=_whole(phase, "requests"),
            input_tokens=_number(prompts, "isl.mean"),
            output_tokens=osl,
            seed=_whole(data, "run_info.random_seed"),
        ),
        version=data["aiperf_version"],
        model=str(models) if models else None,
        date=data.get("start_time"),
        completed=_whole(data, "request_count.avg"),
        failed=None if failed is None else round(failed),
        duration_s=mean.get("benchmark_duration"),
        requests_per_s=mean.get("request_throughput"),
        output_tokens_per_s=mean.get("output_token_throughput"),
        latencies=_latencies(named),
        titles={TTFT: "time_to_first_token", TPOT: "inter_token_latency", GAP: "inter_chunk_latency"},
        concurrency=mean.get("effective_concurrency"),
        queue_ms=mean.get("credit_to_start_latency"),
        waits_count=True,
        cached_share=None if cached is None else cached / 100,
        token_counts=counts,
        runs=_whole(data, "aggregate.num_runs") or 1,
        requests=list(_aiperf_requests(lines)),
        rerun="--export-level records",
    )


def _read_aiperf_records(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    """Reads the records alone, which are all that AIPerf leaves where every request failed."""
    requests = list(_aiperf_requests(documents))
    failed = sum(bool(request.error) for request in requests)
    counts = {"completed": len(requests) - failed, "failed": failed}
    yield AuditedResult(tool="AIPerf", name=_name(path), asked=Asked(), requests=requests, **counts)


def _aiperf_requests(records: Sequence[Any]) -> Iterator[AuditedRequest]:
    for record in records:
        metadata, error = record["metadata"], record.get("error")
        if metadata.get("benchmark_phase") == "warmup":
            continue
        gaps = _at(record, "metrics.inter_chunk_latency.value")
        start, end = metadata["request_start_ns"], metadata["request_end_ns"]
        yield AuditedRequest(
            start_s=start / 1e9,
            latency_s=_times(_number(record, "metrics.request_latency.value"), 1e-3) or (end - start) / 1e9,
            ttft_s=_times(_number(record, "metrics.time_to_first_token.value"), 1e-3),
            gaps_s=[gap / 1e3 for gap in gaps] if isinstance(gaps, list) else None,
            chunks=len(gaps) + 1 if isinstance(gaps, list) else None,
            input_tokens=_whole(record, "metrics.input_sequence_length.value"),
            output_tokens=_whole(record, "metrics.output_sequence_length.value"),
            cached_tokens=_whole(record, "metrics.usage_prompt_cache_read_tokens.value"),
            error=f"{error.get('type')}: {error.get('message', '')}"[:200] if isinstance(error, dict) else "",
        )


# --- inference-perf


def _read_inference_perf(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    (data,) = documents
    successes, load = data["successes"], data["load_summary"]
    config_file, requests_file = path.with_name("config.yaml"), path.with_name("per_request_lifecycle_metrics.json")
    config = read_yaml(config_file) if config_file.is_file() else {}
    stage = re.search(r"stage_(\d+)", path.name)
    plans = _at(config, "load.stages") or []
    plan = plans[int(stage[1])] if stage and int(stage[1]) < len(plans) else {}
    # Run as a rate over a second, whose schedule means nothing. A summary alone does not tell.
    is_closed = "concurrency" in load or _at(config, "load.type") == "concurrent"
    rate = None if is_closed else _number(load, "requested_rate") or _number(plan, "rate")
    latency = successes.get("latency") or {}
    prompts = successes.get("prompt_tokens") or {}
    mismatches = _number(successes, "token_count_mismatches") or 0.0
    guessed = sum(_number(successes, f"client_fallback_requests.{kind}") or 0.0 for kind in ("prompt", "output"))
    counts = [("requests with the tokens that the server counted", float(successes["count"]), successes["count"] - n)
              for n in (mismatches, guessed) if n]  # fmt: skip
    lengths = [_number(config, f"data.{kind}_distribution.mean") for kind in ("input", "output")]
    yield AuditedResult(
        tool="inference-perf",
        name=_name(path),
        asked=Asked(
            concurrency=_number(load, "concurrency") or _number(plan, "concurrency_level"),
            rate=rate,
            limit=_product(config, "load.num_workers", "load.worker_max_concurrency"),
            requests=_whole(load, "count"),
            input_tokens=lengths[0],
            output_tokens=lengths[1],
            seed=_whole(config, "load.base_seed"),
        ),
        model=_at(config, "server.model_name"),
        completed=_whole(successes, "count"),
        failed=_whole(data, "failures.count"),
        duration_s=_number(data, "benchmark_time_seconds"),
        requests_per_s=_number(successes, "throughput.requests_per_sec"),
        output_tokens_per_s=_number(successes, "throughput.output_tokens_per_sec"),
        latencies=_latencies({
            TTFT: _statistics(latency.get("time_to_first_token"), 1e3),
            TPOT: _statistics(latency.get("time_per_output_token"), 1e3),
            E2EL: _statistics(latency.get("request_latency"), 1e3),
        }),
        titles={TTFT: "time_to_first_token", TPOT: "time_per_output_token"},
        queue_ms=None if rate is None else _times(_number(load, "schedule_delay.mean"), 1e3),
        waits_count=rate is not None,
        cached_share=prompts["cached"] / prompts["total"] if prompts.get("total") and "cached" in prompts else None,
        token_counts=counts,
        requests=list(_inference_perf_requests(requests_file)) if requests_file.is_file() and len(plans) < 2 else (),
        rerun="report.request_lifecycle.per_request: true",
    )  # fmt: skip


def _product(data: Any, *paths: str) -> float | None:
    """The product of numbers, None where one is missing or 0, which stands for no limit."""
    numbers = [_number(data, path) for path in paths]
    return None if not all(numbers) else math.prod(number or 0.0 for number in numbers)


def _inference_perf_requests(path: Path) -> Iterator[AuditedRequest]:
    for request in json.loads(path.read_text(encoding="utf-8")):
        answer = _at(request, "info.response_metrics") or {}
        times = answer.get("chunk_times") or []
        start, error = request["start_time"], request.get("error")
        yield AuditedRequest(
            start_s=start,
            latency_s=request["end_time"] - start,
            ttft_s=times[0] - start if times else None,
            gaps_s=[b - a for a, b in pairwise(times)] if times else None,
            chunks=len(times) or None,
            input_tokens=_whole(request, "info.request_metrics.text.input_tokens"),
            output_tokens=answer.get("output_tokens"),
            error=str(error.get("error_type")) if isinstance(error, dict) else "",
        )


# --- reports without requests


def _read_llmd(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    (data,) = documents
    whole, load = data["results"]["request_performance"]["aggregate"], _at(data, "scenario.load.standardized") or {}
    total, failures = (_whole(whole, f"requests.{key}") for key in ("total", "failures"))
    failed = None if failures is None else failures + (_whole(whole, "requests.incomplete") or 0)
    names = {TTFT: "time_to_first_token", TPOT: "time_per_output_token", E2EL: "request_latency"}
    rate = _number(whole, "throughput.request_rate.mean")
    parts = _at(data, "results.observability.components") or []
    hits = [_share(hit) for part in parts if (hit := _at(part, "aggregate.cache_hit_rate")) and "mean" in hit]
    yield AuditedResult(
        tool="llm-d",
        name=_name(path),
        asked=Asked(
            concurrency=_number(load, "concurrency"),
            rate=None if _number(load, "concurrency") else _number(load, "rate_qps"),
            requests=total,
            input_tokens=_number(load, "input_seq_len.value"),
            output_tokens=_number(load, "output_seq_len.value"),
        ),
        version=str(data["version"]),
        date=str(_at(data, "run.time.start") or "") or None,
        completed=None if total is None or failed is None else total - failed,
        failed=failed,
        # What it calls the duration of a run may hold the preparation, too.
        duration_s=(total or 0) / rate if rate else _seconds(_at(data, "run.time.duration")),
        requests_per_s=rate,
        output_tokens_per_s=_number(whole, "throughput.output_token_rate.mean"),
        latencies=_latencies({name: _with_units(_at(whole, f"latency.{key}")) for name, key in names.items()}),
        titles=names,
        cached_share=sum(hits) / len(hits) if hits else None,
        rerun="the result file of the tool that measured it",
    )


def _share(figures: Mapping[str, Any]) -> float:
    return figures["mean"] / (1.0 if figures.get("units") == "fraction" else 100.0)


def _with_units(figures: Any) -> Statistics:
    """The figures in ms: the report says in which unit they are, and its sources differ."""
    unit = str((figures or {}).get("units", "s")).partition("/")[0]
    return _statistics(figures, {"ms": 1.0, "us": 1e-3}.get(unit, 1e3))


def _seconds(duration: Any) -> float | None:
    match = re.fullmatch(r"PT(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?", str(duration or ""))
    return (
        sum(float(part or 0) * scale for part, scale in zip(match.groups(), (3600, 60, 1), strict=True))
        if match
        else None
    )


def _read_inferencex(path: Path, documents: Sequence[Any]) -> Iterator[AuditedResult]:
    for number, data in enumerate(documents, 1):
        accounting = data.get("request_accounting") or {}
        latency = _at(data, "request_metrics.latency") or {}
        named = {TTFT: "ttft", TPOT: "tpot", GAP: "itl", E2EL: "e2el"}
        profiled, dropped = _whole(accounting, "records_profiled"), _whole(accounting, "records_error_dropped")
        yield AuditedResult(
            tool="InferenceX",
            name=_name(path, number, len(documents)),
            asked=Asked(
                concurrency=_number(data, "conc"),
                requests=_whole(data, "num_requests_total"),
                input_tokens=_number(data, "isl"),
                output_tokens=_number(data, "osl"),
            ),
            version=data.get("image"),
            model=data.get("model"),
            completed=_whole(data, "num_requests_successful") or profiled,
            failed=dropped,
            latencies=_latencies({
                name: _flat_statistics(data, key, 1e3) or _statistics(latency.get(key), 1e3)
                for name, key in named.items()
            }),
            titles=named,
            cached_share=_number(data, "server_metrics.cache.gpu_cache_hit_rate"),
            rerun="the raw result file of its benchmark_serving.py",
        )  # fmt: skip


def _name(path: Path, number: int = 1, count: int = 1) -> str:
    name = "/".join(path.parts[-2:])
    return f"{name} [{number}]" if count > 1 else name


_LESS = (  # a part of a name, and the names of what says less beside such a file
    ("profile_export_aiperf.json", r"^profile_export\.jsonl$|^inputs\.json$"),
    ("stage_0_lifecycle_metrics.json", r"^summary_lifecycle|^per_request_lifecycle|\.partial\.stage_\d+\.yaml$"),
)
_Reader = Callable[[Path, Sequence[Any]], Iterator[AuditedResult]]
_FORMATS: tuple[tuple[str, Callable[[Any], bool], _Reader], ...] = (
    ("AIPerf", _has("aiperf_version", "input_config", "run_info"), _read_aiperf),
    ("AIPerf's records", _has("metadata.credit_issued_ns", "metrics"), _read_aiperf_records),
    ("GuideLLM", _has("metadata.guidellm_version", "benchmarks"), _read_guidellm),
    ("inference-perf", _has("load_summary", "successes", "failures"), _read_inference_perf),
    ("llm-d's Benchmark Report", _has("version", "run", "results.request_performance.aggregate"), _read_llmd),
    ("SGLang", _has("total_output_tokens_retokenized", "completed"), _read_vllm),
    ("vLLM", _has("request_throughput", "completed", "mean_ttft_ms"), _read_vllm),
    ("InferenceX", _has("hw", "framework"), _read_inferencex),
)
