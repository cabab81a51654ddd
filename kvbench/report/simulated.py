"""What a report says of a run that was simulated: nothing in it may be taken for a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvbench.common import text as words
from kvbench.report.style import Drawing
from kvbench.runs.model import Run

_NO_CLIENT = (
    "There is no client and no network: TTFT begins when a request reaches the engine, and no request times out."
)
_NO_ANSWERS = (
    "A simulation computes no answers: what a quantised KV, or any other change, does to them is for `kvbench quality`."
)
CODE_PATHS = "The layouts differ besides the page table: paged admission keeps some pages spare for sequences that run."
REPEATS = (
    "One repeat is the same simulated engines anew under other requests, drawn from the seed, identical for all "
    "configurations; ratios are formed within a repeat. Nothing else varies between repeats."
)
MEANING = (
    "simulated",
    "On a virtual clock: scheduler, pages, prefix cache and swap are the built-in engine's own, and a cost model says "
    "how long each step takes on the device.",
)


def on_what(run: Run) -> str:
    """4xA100-80GB; empty for a measured run."""
    count = int(run.simulated.get("tensor_parallel") or 1)
    return f"{f'{count}x' if count > 1 else ''}{run.simulated.get('device', '')}"


def title(run: Run) -> str:
    """The workload, marked where the run is simulated."""
    return f"{run.workload} (simulated)" if run.simulated else run.workload


def facts(run: Run) -> dict[str, Any]:
    """For the table of the environment."""
    if not run.simulated:
        return {}
    known = run.simulated
    return {"simulated": f"{known.get('model')} on {on_what(run)}", "step times": known.get("cost_model")} | {
        name: known[name] for name in ("ops", "calibration") if known.get(name)
    }


def details(run: Run) -> list[str]:
    """What limits the numbers of a simulated run, the most important first."""
    if not run.simulated:
        return []
    calibrated = run.simulated.get("calibration")
    source = f"{run.simulated.get('cost_model')}, " + (
        f"calibrated by {calibrated}" if calibrated else "not calibrated"
    )
    return [
        f"Nothing was measured: kvbench's own scheduler, pages and prefix cache ran on a virtual clock as "
        f"{run.simulated.get('model')} on {on_what(run)}, with step times from a cost model ({source}).",
        _NO_CLIENT,
        _NO_ANSWERS,
    ]


def marked(run: Run, drawing: Drawing) -> Drawing:
    """A figure whose caption says that it is simulated."""
    if not run.simulated:
        return drawing
    return replace(drawing, caption=f"Simulated on {on_what(run)}. {words.upper_first(drawing.caption)}")
