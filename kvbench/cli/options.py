"""What several commands share that is not made of a request yet: options, and a group with a default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvbench.common.options import FiniteRange as FiniteRange
from kvbench.common.options import WritableFile as OutputFile


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


PROFILE = click.option(
    "--profile", metavar="NAME", help="cpu or gpu: which of the file's profiles to use (default: gpu if there is one)."
)
OVERRIDES = click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Set a value of the workload after the profile, e.g. -o engine.kv_budget=64MiB. Repeatable.",
)  # fmt: skip
