"""kvbench: what did a paged KV-cache engine buy, what did it cost, and may it ship?"""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

__version__ = "0.1.0"
IS_INSTALLED = find_spec("kvbench_engine") is not None  # else a checkout on the import path

if not IS_INSTALLED:
    _spec = spec_from_file_location("checkout_names", Path(__file__).parents[1] / "kernels" / "checkout_names.py")
    assert _spec is not None and _spec.loader is not None
    _names = module_from_spec(_spec)
    _spec.loader.exec_module(_names)
    _names.finder()
