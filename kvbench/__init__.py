"""kvbench: what did a paged KV-cache engine buy, what did it cost, and may it ship?"""

import sys
from importlib.util import find_spec
from pathlib import Path


def _engine_is_installed() -> bool:
    """Tests whether ``kvbench_engine`` is installed, and not that of another checkout."""
    folder = Path(__file__).resolve().parents[1]
    spec = find_spec("kvbench_engine")
    own = spec is not None and Path(str(spec.origin)).resolve().parent in (folder / "engine", folder / "kvbench_engine")
    return own and not any(type(finder).__name__ == "CheckoutNames" for finder in sys.meta_path)


IS_INSTALLED = _engine_is_installed()  # else a checkout on the import path
if not IS_INSTALLED:
    import runpy

    runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "checkout_names.py"))["finder"]()


def __getattr__(name: str) -> str:
    """Reads ``__version__`` when somebody asks for it: the tag or commit of a wheel, ``0+checkout`` of a checkout."""
    if name != "__version__":
        raise AttributeError(name)
    from kvbench.common.packages import IS_CHECKOUT

    if IS_CHECKOUT:
        return "0+checkout"  # git tells more
    from importlib.metadata import version

    return version("kvbench")
