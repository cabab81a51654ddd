"""A group of commands whose --help shows them under headings, and whose commands may have moved into a group."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import click

from kvbench.common.errors import UsageError, say
from kvbench.common.plugins import load_plugin
from kvbench.common.text import nearest

OTHERS = "Added by other packages"


class PluginCommands(UserDict[str, click.Command]):
    """The commands of a group by name; an entry point is imported when its command is first used."""

    def __getitem__(self, name: str) -> click.Command:
        command = super().__getitem__(name)
        if isinstance(command, EntryPoint):
            self[name] = command = load_plugin(command, click.Command)
        return command


class SectionedGroup(click.Group):
    """A group of commands under headings; a command without one was added by another package.

    ``sections``: the names by heading, in the order of --help.
    ``moved``: a group whose commands had their place here before: their old names work and say the new ones.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[str]], moved: click.Group | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.moved = moved or click.Group("")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self.moved.get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing:  # a shell completes the words
            return super().resolve_command(ctx, args)
        name = args[0]
        typed = {moved: f"{self.moved.name} {moved}" for moved in self.moved.commands}
        typed |= {command: command for command in self.commands}
        try:
            _, command, rest = super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            error.possibilities = [typed[near] for near in nearest(name, typed, most=3)]  # type: ignore[misc]
            raise
        if name not in self.commands:
            say(f"`kvbench {name}` is now `kvbench {typed[name]}`")
        return typed[name], command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        summaries = {}
        for name in self.list_commands(ctx):
            try:
                summaries[name] = self.commands[name].get_short_help_str(limit)
            except UsageError as error:  # of another package: the others are listed
                say(f"note: {error}")
        named = {name for names in self.sections.values() for name in names}
        others = [name for name in summaries if name not in named]
        for heading, names in {**self.sections, OTHERS: others}.items():
            if rows := [(name, summaries[name]) for name in names if name in summaries]:
                with formatter.section(heading):
                    formatter.write_dl(rows, col_max=limit)
