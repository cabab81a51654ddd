"""What the users of one load share, without a server: whose fault lateness is, what waits to be parsed."""

import subprocess
import sys

from tests.support.loads import ROOT


def test_the_cases_of_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "tests.support.session_cases"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
