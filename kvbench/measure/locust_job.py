"""Draws what ``locust -f kvbench/load/locustfile.py`` sends, in a process of its own: SPEC.json with its requests.

Every process of a distributed test asks for the same requests of the same seed, and sends its own share of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.common.errors import EXIT_OK, EXIT_USAGE, MeasurementError
from kvbench.load import launch
from kvbench.load.locust_options import add_arguments, chosen_load
from kvbench.load.spec import LoadSpec
from kvbench.measure.server import requests_for
from kvbench.measure.server_state import with_default_ends
from kvbench.requests.request import write_requests
from kvbench.targets.choose import require_url
from kvbench.targets.running import OpenAITarget


def main(argv: Sequence[str]) -> int:
    """Writes the files; a sentence on stderr says what is wrong. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.measure.locust_job", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--host", default="")
    parser.add_argument("--test", type=int, default=1, help="which test of this process; others have other prompts")
    parser.add_argument("spec", type=Path)
    try:
        _draw(parser.parse_args(argv))
    except (ValueError, OSError, MeasurementError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _draw(options: argparse.Namespace) -> None:
    """Asks the server for its model and draws for it; without canaries, which nobody judges there."""
    require_url("--host", options.host)
    workload, point = chosen_load(options)
    target = OpenAITarget(
        options.host,
        model=options.kvbench_model or None,
        vocab_size=options.kvbench_vocab_size,
        max_model_len=options.kvbench_max_model_len,
        form=workload.load.form,
    )
    target.start({}, Path())
    try:
        info = target.server_info()
        load = with_default_ends(workload.load.model_copy(update={"canaries": None}), target)
        requests = requests_for(load, point, target, workload.seed, options.test)
    finally:
        target.stop()
    for note in target.notes:
        print(f"kvbench: {note}", file=sys.stderr)
    rows = options.spec.with_name("requests.jsonl")
    write_requests(rows, requests)
    LoadSpec.of(
        load, point, base_url=target.base_url, model=target.model.name, requests_file=str(rows), out_dir="",
        send_priority=launch.takes_priority({"target": options.host}, info), **target.client_fields(),
    ).write(options.spec)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
