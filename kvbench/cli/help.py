"""``kvbench help``: the manual of a command, and every key of a workload file."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click

from kvbench.common.errors import UsageError
from kvbench.common.options import Options, argument, switch, takes
from kvbench.common.packages import SHIPPED
from kvbench.common.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class HelpRequest(Options):
    """The request of ``kvbench help``."""

    topic: tuple[str, ...] = argument("TOPIC", ())
    json_schema: bool = switch("With the topic `workload`: print the JSON schema, for editors.")


@takes(HelpRequest, "help")
def help_command(request: HelpRequest) -> int:
    """Show a command's manual, a workload file's keys, or a page.

    TOPIC is the command, such as `sweep` or `dev tune`, `workload`, or a page of the documentation, such as
    `commands` or `measuring`.

    \b
    Examples:
      kvbench help sweep
      kvbench help workload
      kvbench help workload --json-schema > workload.schema.json
      kvbench help measuring
    \b
    Exit codes: 0 shown, 2 no such topic. No files are written.
    """
    parent, topic = click.get_current_context().parent, request.topic
    assert parent is not None
    if request.json_schema and topic != ("workload",):
        raise UsageError("--json-schema goes with the topic workload only: write `kvbench help workload --json-schema`")
    if topic == ("workload",):
        from kvbench.targets.builtin import engine_settings_schema
        from kvbench.workload.reference import workload_reference, workload_schema

        settings = engine_settings_schema()
        text = json.dumps(workload_schema(settings), indent=1) if request.json_schema else workload_reference(settings)
        click.echo(text.rstrip())
        return 0
    group: click.Command = parent.command
    files = sorted((SHIPPED / "docs").glob("*.md"))
    pages = {page.stem: page for page in files if page.stem not in group.commands and page.stem != "workload"}
    if len(topic) == 1 and topic[0] in pages:
        click.echo(pages[topic[0]].read_text(encoding="utf-8").rstrip())
        return 0
    for name in topic:
        command = group.get_command(parent, name) if isinstance(group, click.Group) else None
        if command is None:
            others = ["workload", *pages] if group is parent.command else []
            raise UsageError(
                f"there is no topic {' '.join(topic)!r}{did_you_mean(name, [*others, *getattr(group, 'commands', ())])}"
            )
        group = command
    parent.command.main([*topic, "--help"], prog_name="kvbench", standalone_mode=False)
    return 0
