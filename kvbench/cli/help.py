"""``kvbench help``: the manual of a command, and every key of a workload file."""

from __future__ import annotations

import json

import click

from kvbench.common.errors import UsageError


@click.command("help")
@click.argument("topic", required=False)
@click.option("--json-schema", is_flag=True, help="Of `workload`: the JSON schema, for editors.")
@click.pass_context
def help_command(context: click.Context, topic: str | None, json_schema: bool) -> int:
    """Show a command's manual, or a workload file's keys.

    TOPIC is the command, or `workload`.

    \b
    Examples:
      kvbench help sweep
      kvbench help workload
      kvbench help workload --json-schema > workload.schema.json
    \b
    Exit codes: 0 shown, 2 no such topic. No files are written.
    """
    assert context.parent is not None
    commands = context.parent.command
    assert isinstance(commands, click.Group)
    if json_schema and topic != "workload":
        raise UsageError("--json-schema goes with the topic workload only: write `kvbench help workload --json-schema`")
    if topic == "workload":
        from kvbench.targets.builtin import engine_settings_schema
        from kvbench.workload.reference import workload_reference, workload_schema

        settings = engine_settings_schema()
        text = json.dumps(workload_schema(settings), indent=1) if json_schema else workload_reference(settings)
        click.echo(text.rstrip())
        return 0
    if topic is None:
        click.echo(context.parent.get_help())
        return 0
    if topic not in commands.commands:
        raise UsageError(f"there is no topic {topic!r}: write workload, or one of {', '.join(commands.commands)}")
    commands.main([topic, "--help"], prog_name="kvbench", standalone_mode=False)
    return 0
