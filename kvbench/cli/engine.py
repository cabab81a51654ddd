"""``kvbench serve`` and ``kvbench dev bench-engine``: the engine's own commands, with its own parsers."""

from __future__ import annotations

import click

from kvbench.common.errors import as_usage_error
from kvbench.common.packages import require_engine

_AS_IT_IS = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}


@click.command(**_AS_IT_IS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> int:
    """Run the built-in engine as an OpenAI-compatible server. See: kvbench serve --help."""
    from kvbench_engine.server.arguments import build_parser

    parsed = build_parser(prog="kvbench serve").parse_args(arguments)  # --help answers before torch is loaded
    require_engine("`kvbench serve`")
    from kvbench_engine.server.__main__ import exit_now, run

    exit_now(run(parsed))
    raise AssertionError("exit_now does not return")


@click.command(name="bench-engine", **_AS_IT_IS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_engine(arguments: tuple[str, ...]) -> int:
    """Time the engine alone, without HTTP, beside its peers. See: kvbench dev bench-engine --help.

    \b
    Example:
      kvbench dev bench-engine --sides kvbench,hf-continuous --repeats 5 --require hf-continuous=5
    \b
    Exit codes: 0 measured, 1 a --require was missed, 2 bad input, 4 the sides did not do the same work or
    other processes took the machine.
    """
    require_engine("`kvbench dev bench-engine`")
    from kvbench.common.foreign_cpu import ForeignWatch
    from kvbench_engine.bench.command import main as bench_main

    with as_usage_error():
        return bench_main(list(arguments), ForeignWatch().report)
