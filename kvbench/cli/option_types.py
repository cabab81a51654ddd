"""Types of options that click does not have."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """As click.FloatRange, which takes nan, and inf where there is no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class OutputFile(click.Path):
    """A file to be written, in a folder that is there: refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))
        folder = path.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "cannot be written to" if folder.is_dir() else "does not exist"
            self.fail(f"{str(path)!r} cannot be written: the folder {str(folder)!r} {why}.", param, ctx)
        return path
