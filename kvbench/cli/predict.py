"""``kvbench predict``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--no-report", is_flag=True, help="Write predictions.json only; `kvbench report` can follow later.")
def predict(results: Path, no_report: bool) -> int:
    """Predict every cell of RESULTS, and show the errors.

    RESULTS is a sweep of the built-in engine, and is predicted by simulation: the requests of each load go through the
    engine's own scheduler, page pool and prefix cache, without a model. The time of each step is a sum of unit costs (a
    step, a token, a token of context ...), which are fitted to the measured loads of all other cells. So an error says
    how far the simulator can be trusted on this machine, or that the machine was disturbed during that load.

    \b
    Examples:
      kvbench predict results/mixed/20260101T120000Z-1a2b3c4
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

    console = Console()
    with as_usage_error():
        run = read_run(results)
    print_plain(console, f"predictions: {predict_run(run)}")
    if known := read_predictions(results):
        for sentence in prediction_sentences(known):
            print_plain(console, sentence)
    if not no_report:
        show_report(results, console)
    return 0
