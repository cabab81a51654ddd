"""A worker that cannot begin to measure: ``python dying_worker.py PORT``."""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
from typing import Any  # noqa: E402

from kvbench.load import process  # noqa: E402
from kvbench.load.multi import worker  # noqa: E402


def _out_of_files(*_: Any) -> None:
    raise OSError(24, "Too many open files")


if __name__ == "__main__":
    process.Measuring.begin = _out_of_files
    sys.exit(worker.run_worker("127.0.0.1", int(sys.argv[1])))
