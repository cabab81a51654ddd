#!/usr/bin/env bash
# Checks and times kvbench on this machine's NVIDIA GPU; see ci/gpu.sh --help and ci/gpu/.
#
#   ci/gpu.sh OUTDIR [--quick] [--wheels DIR] [--part NAME ... | --entry NAME] [--against OUTDIR] [--time-limit SECONDS]
#
# Needs: a CUDA build of torch, Triton and transformers in python3 (3.11 or newer; another one: PYTHON=...), no network.
# What else is missing comes from a folder of wheels, into a temporary environment: ci/gpu_wheels.sh fills such a folder
# on a machine with network. A part whose packages are missing is skipped: the first lines and the summary say which.
#
# Cases run in processes of their own, so that an illegal access, a crash or a hang costs one case and not its part.
#
# OUTDIR gets at most 8 files of at most 16 MiB: summary.md (read this one), manifest.json, kernels.json, engine.json,
# report.html and summary.csv of the sweep, tuned.json, log.txt. Those of an earlier run are removed first; a log of
# yours (*.log, *.out, *.err, *.txt) may lie beside them.
#
# From CI, on a runner with a GPU (--quick takes less than 10 minutes and always leaves a summary):
#   ci/gpu_wheels.sh wheels                       # on a machine with network, once; keep the folder as a cache
#   ci/gpu.sh gpu-results --quick --wheels wheels # exit code 0 passed, 1 a part failed or none ran, 2 usage or no GPU
#   cat gpu-results/summary.md >> "$GITHUB_STEP_SUMMARY"   # and upload gpu-results as an artifact
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -P -m ci.gpu "$@"
