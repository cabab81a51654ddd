#!/usr/bin/env bash
# Fills DIR with the wheels that ci/gpu.sh may miss on a machine without network. Run it where there is network.
#
#   ci/gpu_wheels.sh DIR [--python 3.12] [--skip NAME[,NAME...]]
#
# Wheels are for x86-64 Linux and the given Python, whatever runs this (Python 3.11 or newer; another one: PYTHON=...).
# They are the dependencies of pyproject.toml in the versions of constraints.txt, less what an image for CUDA brings:
# torch, triton, transformers, tokenizers, safetensors and numpy. --skip leaves out what it has as well: the large ones
# are scipy, pandas, pyarrow, numba and llvmlite (together about 150 MiB of 180).
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
fail() { echo "ci/gpu_wheels.sh: error: $1; see ci/gpu_wheels.sh --help" >&2; exit 2; }
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  "") fail "name the folder to fill" ;;
  -*) fail "the folder comes first, not '$1'" ;;
esac
folder="$1"; shift
version=3.12 skip=""
while [ $# -gt 0 ]; do
  case "$1" in
    --python) version="${2:-}"; [[ "$version" =~ ^3\.1[1-9]$ ]] || fail "--python '$version' is no version such as 3.12" ;;
    --skip) skip="${2:-}"; [ -n "$skip" ] || fail "--skip needs names, such as scipy,pandas" ;;
    *) fail "there is no option '$1'" ;;
  esac
  shift 2
done

platforms=()  # pip matches each name exactly
for minor in 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
for name in manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64 linux_x86_64; do platforms+=(--platform "$name"); done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
list="$(mktemp)"; trap 'rm -f "$list"' EXIT
PYTHONPATH="$root" "$python" -P -m ci.gpu.requirements > "$list"

mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --dest "$folder" --only-binary=:all: \
  --implementation cp --python-version "$version" "${platforms[@]}" \
  --constraint "$root/constraints.txt" --requirement "$list"

skip="torch,triton,transformers,tokenizers,safetensors,numpy,$skip"
for name in ${skip//,/ }; do
  for file in "$folder"/*.whl; do
    found="$(basename "$file" | cut -d- -f1 | tr '[:upper:]_.' '[:lower:]--')"
    if [ "$found" = "$(printf '%s' "$name" | tr '[:upper:]_.' '[:lower:]--')" ]; then rm -- "$file"; fi
  done
done
count=$(find "$folder" -name '*.whl' | wc -l)
echo "$count wheels, $(du -sm "$folder" | cut -f1) MiB, for Python $version in $folder: ci/gpu.sh OUTDIR --wheels $folder"
