"""``python -m kvbench.load SPEC.json``: one load in a process of its own. gevent patches before all else."""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
import types  # noqa: E402

# Locust's web page, which a load never shows, would import Flask: a tenth of a second before each load.
_page = types.ModuleType("locust.web")
_page.WebUI = None  # type: ignore[attr-defined]
sys.modules.setdefault(_page.__name__, _page)

from kvbench.load.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
