"""``kvbench dev predict``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.common.options import Options, argument, switch, takes


@dataclass(frozen=True, kw_only=True)
class PredictRequest(Options):
    """The request of ``kvbench dev predict``."""

    results: Path = argument("RESULTS")
    no_report: bool = switch("Write predictions.json only; `kvbench report` can follow later.")


@takes(PredictRequest)
def predict(request: PredictRequest) -> int:
    """Predict every cell of RESULTS, and show the errors.

    RESULTS is a sweep of the built-in engine, and is predicted by simulation: the requests of each load go through the
    engine's own scheduler, page pool and prefix cache, without a model. The time of each step is a sum of unit costs (a
    step, a token, a token of context ...), which are fitted to the measured loads of all other cells. So an error says
    how far the simulator can be trusted on this machine, or that the machine was disturbed during that load.

    \b
    Examples:
      kvbench dev predict results/mixed/20260101T120000Z-1a2b3c4
    \b
    Files written, in RESULTS: predictions.json, and the report anew.
    \b
    Exit codes: 0 predicted, 2 bad input.
    """
    from rich.console import Console

    from kvbench.cli.report import show_report
    from kvbench.common.console import print_plain
    from kvbench.common.errors import as_usage_error
    from kvbench.report.predictions import prediction_sentences
    from kvbench.runs.predictions import read_predictions
    from kvbench.runs.read import read_run
    from kvbench.simulation.calibrate.predict import predict_run

    console, results = Console(), request.results
    with as_usage_error():
        run = read_run(results)
    print_plain(console, f"predictions: {predict_run(run)}")
    if known := read_predictions(results):
        for sentence in prediction_sentences(known):
            print_plain(console, sentence)
    if not request.no_report:
        show_report(results, console)
    return 0
