"""``python -m kvbench.load SPEC.json``: one load in a process of its own. gevent patches before all else but timers.

Two imports that no load needs are left out, since each load waits for them: Locust's web page with Flask below it, and
pandas, which pyarrow imports to ask whether the rows it is to write are pandas'. Together they are half of all imports.
"""

from gevent import monkey

import kvbench.common.kernel_timer  # noqa: F401  # before gevent replaces threads

monkey.patch_all()

import sys  # noqa: E402
import types  # noqa: E402


class _WithoutPandas:
    """A finder of modules, asked first: pandas is as if it were not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "pandas":
            raise ModuleNotFoundError("the load process does without pandas", name=name)


_page = types.ModuleType("locust.web")
_page.WebUI = None  # type: ignore[attr-defined]
sys.modules[_page.__name__] = _page
sys.meta_path.insert(0, _WithoutPandas)  # type: ignore[arg-type]

from kvbench.load.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
