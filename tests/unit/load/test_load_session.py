"""What the users of one load share, without a server: whose fault lateness is, what waits to be parsed."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.loads import ROOT


def test_the_cases_of_a_process_of_its_own() -> None:
    """The cases of tests/support/session_cases.py."""
    command = [sys.executable, "-m", "tests.support.session_cases"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4 and not any(found.values()), "\n".join(found.values())
