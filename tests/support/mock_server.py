"""The mock server as tests start it: any free port, and answers that do not keep them waiting.

    python tests/support/mock_server.py [flags of kvbench mock-server]

What one request gets is written in its model's name, see kvbench/calibration/mock/settings.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvbench.cli.mock_server import mock_server

if __name__ == "__main__":
    mock_server.main(args=["--port", "0", "--ttft-ms", "5", "--itl-ms", "1", *sys.argv[1:]])
