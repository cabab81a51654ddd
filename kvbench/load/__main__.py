"""``python -m kvbench.load SPEC.json``: one load in a process of its own. gevent patches before all else."""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402

from kvbench.load.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
