"""A group of click commands with one that runs when none is named: ``kvbench history results/`` shows the history."""

from __future__ import annotations

from typing import Any

import click


class DefaultGroup(click.Group):
    """``default``: the command that takes what names no other one. Without anything at all, the help is shown.

    A folder with a command's name is given as ``./add``.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)
