"""What several commands share: options, types of options that click does not have, and a group with a default."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvbench.common.files import why_unwritable


class FiniteRange(click.FloatRange):
    """A click.FloatRange that refuses nan, and infinity unless ``inf``."""

    def __init__(self, *args: Any, inf: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inf = inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.inf):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class OutputFile(click.Path):
    """A file to be written into a folder that exists: refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))
        if why := why_unwritable(path.absolute().parent):
            self.fail(f"{str(path)!r} cannot be written: {why}.", param, ctx)
        return path


class DefaultGroup(click.Group):
    """A group with a command that runs when none is named: ``kvbench history results/`` shows the history.

    A folder with a command's name is given as ``./add``. Without anything at all, the help is shown.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def add_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds ``options``, in the order of --help."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


EXISTING = click.Path(exists=True, path_type=Path)
PROFILE = click.option(
    "--profile", metavar="NAME", help="cpu or gpu: which of the file's profiles to use (default: gpu if there is one)."
)
OVERRIDES = click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Set a value of the workload after the profile, e.g. -o engine.kv_budget=64MiB. Repeatable.",
)  # fmt: skip
SEED = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of prompts and order (default: the file's)."
)
NO_CALIBRATION = click.option(
    "--no-calibration", is_flag=True, envvar="KVBENCH_NO_CALIBRATION",
    help="Do not calibrate the load client first; the results say so.",
)  # fmt: skip

RUNNING_SERVER_OPTIONS = (
    click.option("--preset", metavar="NAME",
                 help="What kind of server it is: vllm, sglang, tgi, llamacpp or "
                 "transformers (default: OpenAI's API as vLLM speaks it)."),
    click.option("--model", metavar="NAME",
                 help="The model's name at a running server (default: the first it lists); of kvbench mock-server with "
                 "a query, as mock?ttft_ms=20."),
    click.option("--vocab-size", type=click.IntRange(1), help="If a running server does not tell, or to use less."),
    click.option("--max-model-len", type=click.IntRange(1), help="If a running server does not tell, or to use less."),
    click.option("--tokenizer", type=EXISTING, metavar="DIR", help="For a running server that takes texts only."),
    click.option("--api-key-env", metavar="NAME", help="The environment variable that holds a running server's key."),
    click.option("--tls-ca-file", type=EXISTING, help="https://: certificates to trust."),
    click.option("--no-tls-verify", is_flag=True, help="https://: trust any certificate."),
)  # fmt: skip
TARGET_OPTIONS = (
    click.option("--target", metavar="NAME|URL",
                 help="Launch vllm, sglang, tgi, llamacpp or transformers with the workload's settings (what it cannot "
                 "do is skipped with the reason); or measure an OpenAI-compatible server that runs already, as it is."),
    click.option("--exact", is_flag=True,
                 help="With a launched target: refuse a baseline that it cannot have. Otherwise the nearest one is "
                 "measured, and what differs is said here, in the manifest and in the report."),
    click.option("--target-python", metavar="PATH", help="With --target NAME: the Python that has it."),
    click.option("--target-args", metavar="WORDS", help="With a launched target: more words for its command line."),
    click.option("--serve-cmd", metavar="CMD",
                 help="Launch this instead: with {port}, {model}, {page_size} and other settings in braces, all that "
                 "the sweep varies among them; or a command that takes the built-in server's flags."),
    *RUNNING_SERVER_OPTIONS,
)  # fmt: skip
target_options = add_options(*TARGET_OPTIONS)
