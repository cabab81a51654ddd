"""Makes the cells of a run small before it is committed: `python -m tests.support.compact_summaries RUN_DIR`.

Each summary.json becomes one line without `aggregate`, which follows from `repeats` and is read by no command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvbench.common.files import read_json, write_text


def compact(summary: dict[str, Any]) -> str:
    """Returns the summary as one line of JSON, every figure with all its digits."""
    kept = {name: value for name, value in summary.items() if name != "aggregate"}
    return json.dumps(kept, separators=(",", ":"), allow_nan=False) + "\n"


if __name__ == "__main__":
    for path in Path(sys.argv[1]).rglob("cells/*/summary.json"):
        write_text(path, compact(read_json(path)))
