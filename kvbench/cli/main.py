"""The command line. Imports are lazy, so that ``kvbench --help`` does not wait for torch or pandas."""

from __future__ import annotations

import sys

import click

from kvbench import __version__
from kvbench.cli.groups import PluginCommands, SectionedGroup
from kvbench.cli.run_guarded import guarded
from kvbench.common.plugins import plugins

_SECTIONS = {
    "Everyday": ("init", "plan", "sweep", "load", "report", "recommend", "view", "export", "serve", "doctor"),
    "For CI": ("gate", "compare", "bisect", "audit", "accept", "history"),
    "Studies": ("claims", "simulate", "quality", "trace", "cache-sim", "check-engine"),
    "More": ("dev", "help"),
}
"""The commands by heading, in the order of --help."""
_DEV_SECTIONS = {
    "How well this machine measures": ("doctor", "calibrate-client", "calibrate", "mock-server"),
    "The built-in engine": ("bench-engine", "tune", "canaries"),
    "The simulator": ("calibrate-model", "predict"),
}
_EXIT_CODES = """\b
Exit codes:
  0    done
  1    worse: a regression or drift is shown, or a limit is missed
  2    bad input; nothing was measured
  3    inconclusive: more measurements would decide
  4    the measurement is invalid, or something failed
  5    nothing was compared
  130  interrupted
"""


_DEV = "dev "
_COMMANDS, _DEV_COMMANDS = PluginCommands(), PluginCommands()
for _words, _entry in plugins("commands").items():
    (_DEV_COMMANDS if _words.startswith(_DEV) else _COMMANDS)[_words.removeprefix(_DEV)] = _entry


@click.group(cls=SectionedGroup, sections=_DEV_SECTIONS, commands=_DEV_COMMANDS)
def dev() -> None:
    """Calibrate, tune and check what measures or is measured."""


@click.group(
    cls=SectionedGroup,
    sections=_SECTIONS,
    commands=_COMMANDS,
    moved=dev,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kvbench")
def cli() -> None:
    """Measure what a paged KV cache buys, and what it costs.

    \b
      kvbench plan Qwen3-32B --pick                   which GPUs hold a model, and how many sequences
      kvbench sweep workloads/mixed.yaml              compare settings: measure, decide, write a report
      kvbench load --url URL --input-len 600 --output-len 150 --concurrency 20
                                                      measure a server that runs already
      kvbench recommend results/                      which settings to use, and when not to page

    Results go to results/<workload>/<run>/. `kvbench COMMAND --help` shows the usual options of a command, and
    --help-all all of them. What was interrupted goes on with --resume.

    Servers that kvbench launches listen on 127.0.0.1, and nothing leaves this machine unless you name another: in a
    URL, with --host, or with --bind-host and --master-host of load.
    """


cli.add_command(dev)


def main(argv: list[str] | None = None) -> None:
    """The entry point of the ``kvbench`` script."""

    def run() -> int:
        arguments = list(sys.argv[1:] if argv is None else argv)
        result = cli.main(args=arguments, prog_name="kvbench", standalone_mode=False)
        return result if isinstance(result, int) else 0

    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
