"""Lists the parts' requirements: pyproject's dependencies less those of a CUDA image.

Standard library only.

``python -m ci.gpu.requirements`` prints them with their versions, for ci/gpu_wheels.sh.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from kvbench.common.packages import REPOSITORY

PYPROJECT = REPOSITORY / "pyproject.toml"
BROUGHT = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")  # never replaced
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")  # of the extra `test`: what the device tests need


def package(requirement: str) -> str:
    """The name in a requirement such as ``uvloop>=0.21; platform_system == 'Linux'``."""
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0].lower()


def read_requirements(pyproject: Path = PYPROJECT) -> dict[str, str]:
    """Reads the requirement of each package that the machine may lack, by name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["engine"]]
    tests = {package(line): line for line in extras["test"]}
    return {package(line): line for line in needed if package(line) not in BROUGHT} | {n: tests[n] for n in FOR_TESTS}


def main() -> None:
    """Prints a requirement a line."""
    print("\n".join(read_requirements().values()))


if __name__ == "__main__":
    main()
