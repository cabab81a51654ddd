"""``kvbench export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.common.errors import EXIT_OK, UsageError, say
from kvbench.common.options import ExistingFolder, Options, argument, option, switch, takes


@dataclass(frozen=True, kw_only=True)
class ExportRequest(Options):
    """The request of ``kvbench export``."""

    run: ExistingFolder = argument("RUN")
    form: Literal["vllm", "llm-d", "prometheus", "otlp", "mlflow"] = option(
        "vllm: a result file of `vllm bench serve` for each load; llm-d: a Benchmark Report 0.2 for each; prometheus: "
        "one file in its text format; otlp: one export request of OpenTelemetry in JSON; mlflow: a run of MLflow each.",
        "--as", required=True,
    )  # fmt: skip
    to: Path | None = option("The folder of the files (default: RUN/export).")
    detailed: bool = switch("vllm: with every request, as --save-detailed.")


@takes(ExportRequest)
def export(request: ExportRequest) -> int:
    """Write the loads of RUN as other programs read them.

    RUN is the folder of a sweep or of `kvbench load --output-dir`. The figures are computed anew from every request, by
    the definitions of the format: vLLM's ITL is a gap between chunks, whatever they hold. Invalid loads are written,
    too, and marked as such.

    \b
    Examples:
      kvbench export results/mixed/<run> --as vllm --detailed
      kvbench export results/mixed/<run> --as prometheus --to /var/lib/node_exporter/textfile
      MLFLOW_TRACKING_URI=http://127.0.0.1:5000 kvbench export results/mixed/<run> --as mlflow

    \b
    Exit codes: 0 written, 2 bad input, or MLflow is not installed, 4 MLflow refused.
    """
    from kvbench.common.files import check_output_dir, write_json, write_text
    from kvbench.common.text import plural
    from kvbench.export import formats
    from kvbench.export.loads import read_loads

    loads = read_loads(request.run)
    for load in loads:
        if load.invalid:
            say(f"note: {load.name} is not comparable: {load.invalid}")
    if request.form == "mlflow":
        print(f"logged to MLflow: {plural(formats.to_mlflow(loads), 'run')}")
        return EXIT_OK
    if request.detailed and request.form != "vllm":
        raise UsageError("--detailed is of --as vllm: leave it out")
    folder = request.to or request.run / "export"
    check_output_dir(folder, "--to")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if request.form == "prometheus":
        written.append(folder / "metrics.prom")
        write_text(written[-1], formats.prometheus(loads))
    elif request.form == "otlp":
        written.append(folder / "metrics-otlp.json")
        write_json(written[-1], formats.otlp(loads))
    else:
        for load in loads:
            report = formats.vllm(load, detailed=request.detailed) if request.form == "vllm" else formats.llmd(load)
            written.append(folder / f"{request.form}-{load.name}.json")
            write_json(written[-1], report)
    for path in written:
        print(f"written: {path}")
    return EXIT_OK
