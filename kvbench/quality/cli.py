"""``kvbench quality``, and ``kvbench dev canaries``: prompts with answers that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.common.errors import UsageError, as_usage_error, say
from kvbench.common.option_rules import flag
from kvbench.common.options import Count, Options, OutputFile, argument, option, switch, takes
from kvbench.common.packages import require_engine
from kvbench.workload.options import FileOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvbench.runs.quality import ConfigurationFigures, QualityResult
    from kvbench.workload.file import Workload

_NOT_MEASURED = "–"


@dataclass(frozen=True, kw_only=True)
class ServedOptions(Options, heading="With --url"):
    """The options of a server that is measured in place of the built-in engine."""

    served_model: str | None = option("The model's name at the server (default: the first it lists).", metavar="NAME")
    max_model_len: Count | None = option("The most tokens that the server takes.")
    page_size: Count | None = option(
        "Group the passkeys by their length modulo N, the server's page size (default: 16)."
    )
    api_key_env: str | None = option("The environment variable that holds the server's key.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class QualityRequest(FileOptions, ServedOptions, heading="The measurement"):
    """The request of ``kvbench quality``."""

    workload_or_run: Path | None = argument("WORKLOAD|RUN", None)
    url: str | None = option("Measure the server at this address instead; it serves --model.", metavar="URL")
    model: str | None = option(
        "The model that answers: a folder, or the name of one that ships (default: the workload's own where its "
        "weights are real, else kvbench-tiny).",
        metavar="PATH",
    )
    all: bool = switch("Ask all prompts of configurations that answer like another one, too.")
    output: OutputFile | None = option("The file that the result goes to (default: RUN/quality.json).", metavar="FILE")


@takes(QualityRequest)
def quality(request: QualityRequest) -> int:
    """Measure what configurations change in answers.

    Each is compared with contiguous KV in the model's own dtype, on the same prompts (workloads/quality, passkeys of
    every length, and of a model of its own the workload's first prompts): KL divergence, perplexity, equal greedy
    answers, passkeys, and answers while the KV pool is too small. A control (A/A), the baseline with other
    batch-mates, chunks and order, shows what rounding alone does; a limit is the control and a margin.

    All prompts are asked of each KV dtype and layout. A configuration that answers like one of these (pages of another
    size, prefix caching or swapping in full precision) is only asked at a full pool, and shares the other figures;
    --all asks it everything.

    A workload with random weights (load_format: dummy) is measured with kvbench-tiny, a small trained model: its
    configurations with that model's answers.

    It takes a minute for workloads/mixed.yaml, with kvbench-tiny on 2 cores. Measure with the
    commit and the versions that the run was measured with: `kvbench gate` takes others only with --force.

    With --url, an OpenAI-compatible server that serves --model's folder (default: kvbench-tiny) is compared with
    the built-in engine's contiguous KV in this process: equal greedy answers, passkeys, canaries, and where the
    server answers echo with logprobs perplexity and change in probability. Its control is the server itself, asked
    in other order with fewer requests at once.

    \b
    Examples:
      kvbench quality results/mixed/20260101T120000Z-1a2b3c4
      kvbench quality workloads/mixed.yaml -o model.path=models/Llama-3.1-8B --output quality.json
      kvbench quality --url http://127.0.0.1:8000 --model models/Llama-3.1-8B --output quality.json

    \b
    Files written: quality.json in RUN, or --output's; of a workload or a server none without --output.
    Exit codes: 0 measured, whatever the limits say (kvbench gate holds them), 2 bad input, 4 the server failed.
    """
    from rich.console import Console

    from kvbench.workload.file import load_workload

    require_engine("`kvbench quality`")
    source, model, output = request.workload_or_run, request.model, request.output
    served, changes = request.part(ServedOptions), request.profile or request.overrides
    if (request.url is None) == (source is None):
        raise UsageError("name either a WORKLOAD or RUN, or the server to measure with --url")
    if source is None:
        if changes or request.all:
            raise UsageError("a server is measured as it is: omit --profile, -o and --all")
        stated = {name: getattr(served, name) for name in served.stated}
        _measure_server(str(request.url), Console(), model, output, stated)
        return 0
    if served.stated:
        raise UsageError(f"{flag(min(served.stated))} needs a server: name it with --url")
    if source.is_dir():
        if changes:
            raise UsageError("a run that was measured cannot be changed: omit --profile and -o, or name the workload")
        measure_run(source, Console(), model=model, every=request.all, output=output)
    else:
        workload = load_workload(source, profile=request.profile, overrides=request.overrides)
        _measure(workload, (), Console(), model, request.all, output)
    return 0


def measure_run(
    folder: Path, console: Console, *, model: str | None = None, every: bool = False, output: Path | None = None
) -> None:
    """Measures the configurations of a run and writes its quality.json, or ``output``. Raises UsageError."""
    from kvbench.runs.quality import QUALITY

    _measure(*_of_run(folder), console, model, every, output or folder / QUALITY)


def _measure(
    workload: Workload, only: Sequence[str], console: Console, model: str | None, every: bool, output: Path | None
) -> None:
    """Measures the configurations of a workload. ``only``: globs of cells; ``output``: None for none."""
    from kvbench.common.console import print_plain, status_line
    from kvbench.common.text import plural
    from kvbench.quality.parts import QualityPart, measure_parts
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import plan_sweep

    configurations = plan_sweep(workload, only, check_configuration)[0].configurations
    print_plain(console, f"quality: {plural(len(configurations), 'configuration')} of {workload.name}")
    with status_line(console, "loading") as status:
        result = measure_parts(QualityPart(workload, configurations, model=model, every=every), status)
    _show(result, console, output)


def _measure_server(
    url: str, console: Console, model: str | None, output: Path | None, options: dict[str, Any]
) -> None:
    """Measures a running server. ``options``: those about the server that were given."""
    from kvbench.common.console import status_line
    from kvbench.targets.base import Access
    from kvbench_engine.startup import set_spin_count

    set_spin_count()  # before torch is imported
    from kvbench.quality.measure import BESIDE
    from kvbench.quality.served import measure_served

    access = Access(api_key_env=options.pop("api_key_env", None))
    with status_line(console, "loading") as status:
        result = measure_served(url, model=model or BESIDE, access=access, say=status, **options)
    _show(result, console, output)


def _show(result: QualityResult, console: Console, output: Path | None) -> None:
    """Prints the table, what each configuration breaks, what answered and what was left out; writes ``output``."""
    from kvbench.common.console import print_plain, print_table
    from kvbench.common.records import write_record
    from kvbench.common.text import and_more

    print_table(console, _table(result), drop_first=("RMS Δp", "KLD p99"))
    broken = ((config_id, figures.outside) for config_id, figures in result.configurations.items())
    lines = [f"{config_id}: {sentence}" for config_id, sentences in broken for sentence in sentences]
    facts = result.facts
    whose = f"measured with {result.model}, beside the workload" if result.beside else "measured with its own model"
    lines.append(f"{whose}: weights {result.weights}; {facts.seconds:.0f} s")
    if facts.left_out:
        lines.append(f"{facts.left_out} of {facts.prompts + facts.left_out} prompts are longer than the context")
    for leader, names in result.followers.items():
        lines.append(f"{and_more(names)}: asked at a full pool; the other figures are those of {leader}")
    lines += [f"not measured: {missing}" for missing in facts.not_measured]
    for line in filter(None, (*lines, result.note, f"written: {output}" if output else "")):
        print_plain(console, line)
    if output is not None:
        write_record(output, result)


def _of_run(folder: Path) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a run, and the globs of its cells. Raises UsageError for a run of another engine."""
    from kvbench.common.git import git_state
    from kvbench.common.machine import versions
    from kvbench.runs.folder import open_run
    from kvbench.runs.manifest import stored_workload
    from kvbench.runs.quality import code_differences
    from kvbench.runs.results import GitState

    manifest = open_run(folder).manifest()
    if manifest.simulated:
        raise UsageError(f"{folder} is simulated, so there are no answers: give the folder of a measured run")
    backend = manifest.backend or "kvbench"
    if backend != "kvbench" or manifest.target:
        raise UsageError(
            f"{folder} was measured on {manifest.target or backend}, but a run's quality is measured on the built-in "
            "engine only: use `kvbench quality --url` with its server, and take kld and quality out of its policy"
        )
    if different := code_differences(GitState(**git_state()), versions(), manifest):  # before the minutes that it takes
        say(f"warning: {'; '.join(different)}: `kvbench gate` takes these figures only with --force")
    return stored_workload(manifest), manifest.only or ()


def _table(result: QualityResult) -> Table:
    from kvbench.common.console import make_table

    heads = (
        "configuration", "KLD mean", "KLD p99", "RMS Δp", "perplexity", "equal answers", "passkeys", "equal, full pool",
        "canaries", "limits",
    )  # fmt: skip
    rows = [("control (A/A)", *_cells(result.control), "")]
    for config_id, figures in result.configurations.items():
        rows.append((config_id, *_cells(figures), "outside" if figures.outside else "within"))
    facts = result.facts
    what = f"{result.model} in {facts.dtype} on {facts.device}"
    shown = [i for i in range(len(heads)) if {row[i] for row in rows} != {_NOT_MEASURED}]
    title = f"{result.workload}, {what}: against contiguous KV in that dtype"
    return make_table([heads[i] for i in shown], [[row[i] for i in shown] for row in rows], title=title)


def _cells(figures: ConfigurationFigures) -> tuple[str, ...]:
    """Writes the cells of a row, such as `0.0012 (0.0010 to 0.0014)`, `+0.12 %`, `45 of 46`; `–`: not measured."""
    pool, canaries = figures.full_pool, figures.canaries

    def number(template: str, *values: float | None) -> str:
        return _NOT_MEASURED if None in values else template.format(*values)

    return (
        number("{:.2g} ({:.2g} to {:.2g})", figures.mean, figures.mean_low, figures.mean_high),
        number("{:.2g}", figures.p99),
        number("{:.2%}", figures.rms_dp),
        number("{:+.2%}", figures.perplexity_change),
        f"{figures.greedy.agree} of {figures.greedy.answers}",
        f"{figures.passkey.right} of {figures.passkey.asked}",
        f"{pool.agree} of {pool.answers}" if pool else _NOT_MEASURED,
        f"{canaries.right} of {canaries.asked}" if canaries else _NOT_MEASURED,
    )


@dataclass(frozen=True, kw_only=True)
class CanariesRequest(Options):
    """The request of ``kvbench dev canaries``."""

    model: str = argument("MODEL")
    output: OutputFile = option("The file that the canaries go to (JSONL).", required=True, metavar="FILE")
    passkeys: int = option("Draw N passkeys.", default=64, least=0, most=1000)
    copies: int = option("Draw N copies.", default=32, least=0, most=1000)
    seed: int = option("Seed of all that is drawn.", default=0)
    dtype: str = option("The engine's setting dtype, of weights and KV.", default="auto")
    device: str = option("The engine's setting device.", default="auto")


@takes(CanariesRequest)
def canaries(request: CanariesRequest) -> int:
    """Make prompts whose answers MODEL surely knows.

    Loads check the answers of a server with them.

    A passkey hides five digits in text and asks for them; two or three share the text before their keys, and the 64
    have every remainder by 64 as their length, so that their ends meet every place of a page. A copy repeats the
    beginning of a passage that came early, and is to go on with it. Kept are those that contiguous KV in the model's
    own dtype answers rightly, every token at least 0.5 nats likelier than the second likeliest: rounding does not
    change them, so a wrong answer under load is an error.

    MODEL is a folder with weights, or the name of a model that ships.

    \b
    Examples:
      kvbench dev canaries models/Llama-3.1-8B --output llama.jsonl
      kvbench dev canaries kvbench-tiny --output workloads/canaries/kvbench-tiny.jsonl

    \b
    Files written: --output's.
    Exit codes: 0 written, 2 bad input, such as a model that answers none.
    """
    from rich.console import Console

    from kvbench.common.console import print_plain, status_line

    require_engine("`kvbench dev canaries`")
    from kvbench.quality.make_canaries import make_canaries
    from kvbench.requests.canaries import write_canaries
    from kvbench_engine.config import EngineConfig
    from kvbench_engine.model.spec import find_model, uses_random_weights

    console, model, passkeys, copies = Console(), request.model, request.passkeys, request.copies
    if not passkeys + copies:
        raise UsageError("0 passkeys and 0 copies are no canaries: ask for at least one")
    with as_usage_error():
        config = EngineConfig(model=model, layout="contiguous", dtype=request.dtype, device=request.device)
        if uses_random_weights(find_model(model), "auto"):
            raise ValueError(f"model {model!r} has no weights to answer with: give a folder with *.safetensors")
        with status_line(console, "loading") as status:
            made, dropped = make_canaries(config, passkeys=passkeys, copies=copies, seed=request.seed, say=status)
        if not made.canaries:
            raise ValueError(f"model {model!r} is sure of none of the answers: it is too weak for canaries")
    write_canaries(request.output, made)
    for kind, asked in (("passkey", passkeys), ("copy", copies)):
        kept = sum(canary.kind == kind for canary in made.canaries)
        print_plain(console, f"{kind}: {kept} of {asked}; {dropped.get(kind, 0)} drawn and dropped")
    print_plain(console, f"written: {request.output}")
    return 0
