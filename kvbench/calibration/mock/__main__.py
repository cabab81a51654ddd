"""``python -m kvbench.calibration.mock``: the same as ``kvbench mock-server``."""

import sys

from kvbench.cli.mock_server import mock_server
from kvbench.cli.run_guarded import guarded


def run() -> int:
    """The command's exit code."""
    result = mock_server.main(args=sys.argv[1:], prog_name="python -m kvbench.calibration.mock", standalone_mode=False)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(guarded(run))
