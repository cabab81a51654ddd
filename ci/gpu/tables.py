"""Makes the summary's tables of parts whose cases run in processes of their own, from their rows.

Standard library only.
"""

from __future__ import annotations

from typing import Any

from ci.gpu.part import PartReport, number_text

OURS = "kvbench"  # our kernels' name beside others'
SHOWN_KERNELS = 8  # of those that the profile keeps


def conclude(module: str, report: PartReport, args: Any) -> None:
    """Makes tables and headline of ``module``'s part."""
    tables = {
        "facts": ceilings, "time_kernels": kernels, "check_tokens": tokens, "engine_job": engine, "peer_kernels": peers,
    }  # fmt: skip
    tables.get(module, checks)(report, args)
    report.save()


def checks(report: PartReport, args: Any) -> None:
    """Makes the table of rows that are checks."""
    passed = sum(row["status"] == "passed" for row in report.data["rows"])
    report.data["headline"] = f"{passed} of {len(report.data['rows'])} checks passed"
    if not report.data["rows"] and report.data["skipped"]:
        report.data["not_run"] = report.data["skipped"][0]["reason"]


def ceilings(report: PartReport, args: Any) -> None:
    """Keeps the best figure of each ceiling."""
    rows = report.data["rows"]
    if not rows:
        report.data["not_run"] = "no time left"
    best: dict[str, float] = {}
    for row in rows:
        best[row["ceiling"]] = max(row["value"], best.get(row["ceiling"], 0.0))
    report.data["ceilings"] = best
    report.data["headline"] = ", ".join(f"{name} {value:,.0f}" for name, value in best.items())
    shown = [[row["ceiling"], f"{row['value']:,.4g}", row["how"]] for row in rows]
    report.table("Measured ceilings (the largest counts)", ["ceiling", "value", "how"], shown)


def tokens(report: PartReport, args: Any) -> None:
    """Makes one table row a way."""
    columns, rows = ["way", "result", "preemptions", "slots swapped in", "prefix hits"], report.data["rows"]
    shown = ("case", "status", "preemptions", "swapped_in_slots", "prefix_hits")
    report.table("Greedy tokens of whole engines", columns, [[str(row[key]) for key in shown] for row in rows])
    passed = sum(row["status"] == "passed" for row in rows)
    report.data["headline"] = f"{passed} of {report.data.get('cases', 0)} ways give the tokens of Hugging Face generate"


AIMS = (  # a row's figure, its aim, whether it is met, the sign for it
    ("ratio", "bar", lambda value, bar: value >= bar, "≥"),
    ("time_ratio", "bar_time", lambda value, bar: value <= bar, "≤"),
    ("of_torch_speed", "bar_torch", lambda value, bar: value >= bar, "≥"),
    ("gb_per_s", "bar_gb_per_s", lambda value, bar: value >= bar, "≥"),
)


def kernels(report: PartReport, args: Any) -> None:
    """Makes the kernels' table. Rows are compared with the project's aims on a GPU only, whose shapes they are for."""
    aimed = args.device == "cuda"
    times = {row["case"]: row["us"] for row in report.data["rows"]}
    rows, missed = [], []
    for row in report.data["rows"]:
        if row.get("against") in times:
            row["time_ratio"] = row["us"] / times[row["against"]]
        speed = f"{row['gb_per_s']:,.4g} GB/s" if "gb_per_s" in row else f"{row['tflop_per_s']:,.3g} TFLOP/s"
        notes = []
        for key, bar, met, sign in AIMS:
            if aimed and row.get(key) is not None and row.get(bar) is not None:
                good = met(row[key], row[bar])
                notes.append(f"{key} {row[key]:.3g} {'meets' if good else 'MISSES'} {sign} {row[bar]:g}")
                missed += [] if good else [row["case"]]
            elif row.get(key) is not None and key in ("time_ratio", "of_torch_speed"):
                notes.append(f"{key} {row[key]:.2f}")
        rows.append([row["case"], f"{row['us']:,.1f}", speed, number_text(row["ratio"]), "; ".join(notes)])
    report.data["missed"] = missed
    report.data["headline"] = f"{len(rows)} kernels timed" + (f", {len(missed)} below their aim" if aimed else "")
    report.table(
        "Kernels (time: median; ratio: of the measured ceiling)", ["case", "us", "reached", "ratio", "aim"], rows
    )


def peers(report: PartReport, args: Any) -> None:
    """Shows a row a kernel, ours first, and a column a case."""
    rows = {(row["kernel"], row["case"]): row for row in report.data["rows"]}
    kernels, cases = ({OURS: None} | {key[0]: None for key in rows}), list(dict.fromkeys(key[1] for key in rows))
    for (_, case), row in rows.items():
        row["of_ours"] = row["us"] / rows[OURS, case]["us"] if (OURS, case) in rows else None
    shown = [[kernel, *(_peer_cell(rows.get((kernel, case))) for case in cases)] for kernel in kernels]
    title = "Decode kernels of other projects, us (time over ours; share of the read ceiling; launched: no graph)"
    report.table(title, ["kernel", *cases], shown)
    if all(kernel == OURS for kernel, _ in rows):
        reasons = [skipped["reason"] for skipped in report.data["skipped"]]
        report.data["not_run"] = f"no kernel of another project was timed: {reasons[0] if reasons else 'no time left'}"
    ratios = {key: row["of_ours"] for key, row in rows.items() if key[0] != OURS and row["of_ours"]}
    fastest = min(ratios, key=ratios.__getitem__, default=None)
    report.data["headline"] = f"{len(rows)} times of kernels" + (
        f"; the fastest peer takes {ratios[fastest]:.2f} of our time ({', '.join(fastest)})" if fastest else ""
    )


def _peer_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    how = "" if row["graph"] else ", launched"
    return f"{row['us']:,.1f} ({number_text(row['of_ours'])}; {number_text(row['ratio'])}{how})"


def engine(report: PartReport, args: Any) -> None:
    """Makes one table row a run, and the table of a decode step's largest kernels.

    Variants have a table of their own.
    """
    label = " (tiny shape)" if args.tiny else ""
    runs = [row for row in report.data["rows"] if row["variant"] is None]
    _runs_table(report, runs, label)
    _variants_table(report, [row for row in report.data["rows"] if row["variant"] is not None], label)
    _profile_table(report)


def _runs_table(report: PartReport, runs: list[dict[str, Any]], label: str) -> None:
    if not runs:
        return
    columns = ["model", "sequences", "output tok/s", "floor tok/s", "share", "TTFT p50 / max ms", "step p50 ms",
               "busy %"]  # fmt: skip
    busy = report.data.get("busy_share_in_decode")
    rows = [
        [
            row["model"] + label,
            str(row["sequences"]),
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['floor_tokens_per_s']:,.0f}" if "floor_tokens_per_s" in row else "–",
            f"{row['share_of_floor']:.2f}" if "share_of_floor" in row else "–",
            f"{row['ttft_ms']['p50']:,.0f} / {row['ttft_ms']['max']:,.0f}",
            f"{row['step_ms']['p50']:.2f}",
            "–" if busy is None else f"{100 * busy:.0f}",
        ]
        for row in runs
    ]
    report.table("Batch job of nano-vllm's shape, engine in process", columns, rows)
    best = max(runs, key=lambda row: row["output_tokens_per_s"])
    report.data["headline"] = f"{best['output_tokens_per_s']:,.0f} output tok/s, {best['sequences']} sequences{label}"


def _variants_table(report: PartReport, runs: list[dict[str, Any]], label: str) -> None:
    if not runs:
        return
    first = runs[0]["output_tokens_per_s"]
    columns = ["variant", "output tok/s", "of the first", "step p50 ms", "load s", "preempted"]
    rows = [
        [
            row["variant"],
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['output_tokens_per_s'] / first:.2f}",
            f"{row['step_ms']['p50']:.2f}",
            f"{row['load_seconds']:.0f}",
            str(row["preemptions"]),
        ]
        for row in runs
    ]
    name = f"Variants of the engine, {runs[0]['model']}{label}, outputs of at most {runs[0]['longest_output']} tokens"
    report.table(name, columns, rows)
    report.data["headline"] = f"{len(runs)} of {report.data.get('cases', 0)} variants measured{label}"


def _profile_table(report: PartReport) -> None:
    kernel_rows = report.data.get("kernels_of_a_decode_step")
    if not kernel_rows:
        return
    total = sum(row["us"] for row in kernel_rows) + report.data["other_kernels_us"]
    rows = [
        [row["name"][:90], f"{row['count']:.1f}", f"{row['us']:,.1f}", f"{row['us'] / total:.0%}"]
        for row in kernel_rows[:SHOWN_KERNELS]
    ]
    launches = report.data["kernels_a_decode_step"]
    report.table(
        f"Largest kernels of a decode step, {report.data['profiled']} ({launches:.0f} kernels and copies a step, "
        f"{total:,.0f} us; engine.json has {len(kernel_rows)} of them)",
        ["kernel", "times a step", "us a step", "share"], rows,
    )  # fmt: skip
