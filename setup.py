"""Names the packages: engine/ and kernels/ are installed as kvbench_engine and kvbench_kernels.

PyPI has another package that is imported as `kernels`. All other facts are in pyproject.toml.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SHIPPED = {f"kvbench.shipped.{folder}": folder for folder in ("workloads", "docs", "ci")}  # kvbench/common/packages.py


class DataOnly(build_py):
    """Leaves the scripts beside the shipped data out."""

    def find_package_modules(self, package, package_dir):
        return [] if package in SHIPPED else super().find_package_modules(package, package_dir)


setup(
    cmdclass={"build_py": DataOnly},
    packages=[
        *find_packages(include=["kvbench", "kvbench.*"]),
        *(f"kvbench_{name}" for name in find_packages(include=["engine", "engine.*", "kernels", "kernels.*"])),
        *SHIPPED,
    ],
    package_dir={"kvbench_engine": "engine", "kvbench_kernels": "kernels", **SHIPPED},
)
