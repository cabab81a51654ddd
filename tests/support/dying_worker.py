"""A worker whose measuring dies, or falls silent: ``python dying_worker.py PORT begin|priority|silent``."""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402

from kvbench.load.multi import worker as distributed_worker  # noqa: E402
from kvbench.load.multi.join import run_worker  # noqa: E402


def _out_of_files(*_: Any) -> None:
    raise OSError(24, "Too many open files")


def main(port: str, how: str) -> int:
    if how == "begin":
        distributed_worker.Measuring.begin = _out_of_files
    elif how == "priority":
        distributed_worker.undisturbed = _out_of_files
    else:
        distributed_worker.watch = lambda *_: gevent.sleep(600)
    return run_worker("127.0.0.1", int(port))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
