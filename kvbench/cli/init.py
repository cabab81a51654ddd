"""``kvbench init``: writes a short workload file."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import click

from kvbench.common.errors import UsageError
from kvbench.common.options import argument, option, takes
from kvbench.common.packages import find_file
from kvbench.workload.options import Answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitRequest(Answers, heading="The file"):
    """The request of ``kvbench init``."""

    file: Annotated[Path, click.Path(dir_okay=False, path_type=Path)] = argument("FILE")
    copied: str | None = option(
        "Copy this workload, with its comments: a file, or the name of one that ships, such as mixed.",
        "--from", metavar="FILE|NAME",
    )  # fmt: skip
    profile: Literal["cpu", "gpu"] | None = option(
        "Make a workload of the size for a CPU or a GPU (default: by this machine)."
    )


@takes(InitRequest)
def init(request: InitRequest) -> int:
    """Write a short commented workload to FILE.

    `kvbench plan` and `kvbench sweep` read it.

    On a terminal it asks for what the options do not say.

    \b
    Examples:
      kvbench init my.yaml
      kvbench init my.yaml --input-len 600 --output-len 150 --concurrency 20 --vary page_size=16,32
      kvbench init my.yaml --from mixed
    \b
    Files written: FILE, which must be new.
    Exit codes: 0 written, 2 bad input, or FILE is there already.
    """
    from kvbench.common.files import why_unwritable
    from kvbench.sweep.plan import preflight
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import plan_sweep
    from kvbench.workload.file import default_profile, load_workload
    from kvbench.workload.from_options import workload_text
    from kvbench.workload.settings import slug

    file = request.file
    if file.exists():
        raise UsageError(f"{file} is there already: give a new name, or remove it first")
    if why := why_unwritable(file.absolute().parent):
        raise UsageError(f"{file} cannot be written: {why}")
    if request.copied is not None:
        if others := [name for name in request.given if name not in ("file", "copied")]:
            raise UsageError(f"--from copies a file as it is: leave {request.typed(others[0])} out, or change the copy")
        _copy(request.copied, file)
        return _written(file)
    answers = request.part(Answers)
    if sys.stdin.isatty():
        answers = _ask(answers)
    chosen = request.profile or default_profile()
    text = workload_text(answers, profile=chosen, name=slug(file.stem).lstrip("._-") or None)
    workload = load_workload(file, text=text, profile=chosen)  # refuses what no workload can have
    preflight(workload, plan_sweep(workload, (), check_configuration)[0], check_configuration)
    file.write_text(text, encoding="utf-8")
    return _written(file)


def _copy(workload: str, file: Path) -> None:
    """Copies a workload. Raises UsageError for one that is wrong, or whose files would not be found any more."""
    from kvbench.workload.file import load_workload

    load_workload(workload)
    file.write_text(find_file(Path(workload)).read_text(encoding="utf-8"), encoding="utf-8")
    try:
        load_workload(file)
    except UsageError as error:
        file.unlink()
        raise UsageError(f"the copy would not be whole, as its files lie beside the original: {error}") from None


def _written(file: Path) -> int:
    click.echo(f"written: {file}. Next: kvbench plan {file}, then kvbench sweep {file}")
    return 0


def _ask(answers: Answers) -> Answers:
    """Asks for what the options do not say."""
    lengths, users, vary = {}, answers.concurrency, answers.vary
    if not answers.dataset_path:
        for name, question, default in (("input_len", "tokens in", "600"), ("output_len", "tokens out", "150")):
            lengths[name] = getattr(answers, name) or click.prompt(f"{question} (or LOW:HIGH)", default=default)
    if not (users or answers.request_rate or answers.dataset_path):
        users = (click.prompt("users at once", default=8, type=click.IntRange(1)),)
    if not vary:
        asked = click.prompt("what to compare (setting=A,B setting=A,B; - for nothing)", default="page_size=16,32")
        vary = () if asked.strip() == "-" else tuple(asked.split())
    return dataclasses.replace(answers, concurrency=users, vary=vary, **lengths)
