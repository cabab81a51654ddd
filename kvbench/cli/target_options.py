"""The options of ``kvbench sweep`` that say what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(exists=True, path_type=Path)

_OPTIONS = (
    click.option(
        "--target", metavar="NAME|URL",
        help="Launch vllm, sglang, tgi, llamacpp or transformers with the workload's settings (what it cannot do is "
        "skipped with the reason); or measure an OpenAI-compatible server that runs already, as it is.",
    ),
    click.option(
        "--exact", is_flag=True,
        help="With a launched target: refuse a baseline that it cannot have. Otherwise the nearest one is measured, "
        "and what differs is said here, in the manifest and in the report.",
    ),
    click.option("--target-python", metavar="PATH", help="With --target NAME: the Python that has it."),
    click.option("--target-args", metavar="WORDS", help="With a launched target: further words for its command line."),
    click.option(
        "--serve-cmd", metavar="CMD",
        help="Launch this instead: with {port}, {model}, {page_size} and other settings in braces, all that the sweep "
        "varies among them; or a command that takes the built-in server's flags.",
    ),
    click.option("--preset", metavar="NAME", help="With --target URL or --serve-cmd: what kind of server that is."),
    click.option("--model", metavar="NAME", help="With --target URL: the model's name there (default: the first)."),
    click.option("--vocab-size", type=click.IntRange(1), help="With --target URL: if the server does not tell."),
    click.option("--max-model-len", type=click.IntRange(1), help="With --target URL: if the server does not tell."),
    click.option("--tokenizer", type=_FILE, metavar="DIR", help="With --target URL: for one that takes texts only."),
    click.option("--api-key-env", metavar="NAME", help="With --target URL: the variable that holds the API key."),
    click.option("--tls-ca-file", type=_FILE, help="With --target https://...: certificates to trust."),
    click.option("--no-tls-verify", is_flag=True, help="With --target https://...: trust any certificate."),
)  # fmt: skip


def target_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, in this order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
