#!/usr/bin/env bash
# Fills .bring with what an entry of docs/gpu.md's queue takes along to a GPU without network. Run it where there is one.
#
#   ci/gpu/bring.sh peers                      vLLM, FlashAttention 3 and FlashInfer, its kernels compiled by nvcc
#   ci/gpu/bring.sh before-after REF           engine/ and kernels/ of the commit REF
#   ci/gpu/bring.sh settings|sharpness|long    wheels of what the GPU's image lacks
#
# What an earlier call left is removed. For Python 3.12 on x86-64 Linux. PYTHON (python3) packs; where it is a 3.12 and
# nvcc 13 is here, FlashInfer's kernels are compiled, in an environment that is made for it (5 GB, removed in the end).
# PEER_TOOLS: the folder of make_peers.py (../shared/gpu_peers).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
python="${PYTHON:-python3}" tools="${PEER_TOOLS:-../shared/gpu_peers}" limit=$((64 << 10))  # KiB that may travel
image=annotated-doc,anyio,certifi,charset-normalizer,click,h11,httpcore,httpx,hypothesis,idna,iniconfig,jinja2,llvmlite
image+=,markdown-it-py,markupsafe,mdurl,msgpack,narwhals,numba,nvidia-ml-py,packaging,pandas,pluggy,prometheus-client
image+=,psutil,pyarrow,pygments,pytest,pytest-timeout,python-dateutil,pyyaml,requests,rich,scipy,sortedcontainers
image+=,typing-extensions,urllib3,uvloop,werkzeug  # what it has

fail() { echo "ci/gpu/bring.sh: error: $1; see ci/gpu/bring.sh --help" >&2; exit 2; }

build=(torch==2.11.0 numpy ninja einops tabulate tqdm requests nvidia-ml-py click packaging)  # to compile FlashInfer

bring_peers() {  # the packs, with FlashInfer's four kernels: the GPU's time is not for compilers
  local work site builder kernel; work="$(mktemp -d)"; site="$work/fi" builder="$work/env/bin/python"
  trap "rm -rf '$work'" EXIT
  "$python" "$tools/make_peers.py" "$work" --part-mib 60
  "$python" "$tools/make_flashinfer.py" "$work"
  if { "$python" -m venv "$work/env" && "$builder" -m pip install -q "${build[@]}" &&
      MAX_JOBS="$(nproc)" PYTHON="$builder" bash "$tools/flashinfer_compile.sh" "$site" "$work" \
        decode_bf16 decode_fp8 prefill_bf16 prefill_fp8; } > "$work/log" 2>&1; then
    for kernel in "$work"/.cache/flashinfer/*/*/cached_ops/*/*.so; do
      install -D "$kernel" "$site/flashinfer/data/aot/$(basename "$kernel" .so)/$(basename "$kernel")"
    done
    rm -rf "$site"/flashinfer/data/{cutlass,cccl,spdlog,include}
  else
    echo "FlashInfer's kernels are left to the GPU's machine, they could not be compiled here: $(tail -n 1 "$work/log")" >&2
  fi
  rm -rf "$site"/*tvm_ffi*  # vLLM's pack has it
  mkdir -p .bring/peers
  cp "$work"/peer*/* "$tools/join_peers.sh" .bring/peers
  tar -C "$site" -cJf .bring/peers/flashinfer.tar.xz .
}

name="${1:-}" ref="${2:-}"
case "$name" in
  -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  peers) [ -f "$tools/make_peers.py" ] || fail "there is no make_peers.py in $tools: set PEER_TOOLS to its folder" ;;
  before-after)
    [ -n "$ref" ] || fail "before-after needs a commit"
    commit="$(git rev-parse --verify --quiet --end-of-options "$ref^{commit}")" || fail "there is no commit '$ref'"
    git cat-file -e "$commit:engine/parent.py" 2> /dev/null \
      || fail "'$ref' is too old: ci/gpu/engine_turns.py needs an engine that has engine/parent.py" ;;
  settings | sharpness | long) ;;
  *) fail "there is no entry '$name': name peers, before-after, settings, sharpness or long" ;;
esac
[ $# -le $([ "$name" = before-after ] && echo 2 || echo 1) ] || fail "there is nothing to do with '${!#}'"

rm -rf .bring
case "$name" in
  peers) bring_peers ;;
  before-after)
    mkdir -p .bring/before
    git archive "$commit" engine kernels | tar -x -C .bring/before
    echo "$commit" > .bring/before/COMMIT ;;
  *) bash ci/gpu_wheels.sh .bring/wheels --skip "$image" ;;
esac
brought=$(du -sk --apparent-size .bring | cut -f1)
tree=$(git ls-files -z --cached --others --exclude-standard | du -ck --apparent-size --files0-from=- 2> /dev/null | tail -1 | cut -f1)
echo ".bring: $((brought >> 10)) MiB, for ci/gpu/queue.sh $name; the repository: $((tree >> 10)) MiB"
over=$((brought + tree - limit))
[ $over -le 0 ] || { echo "ci/gpu/bring.sh: together $(((over + 1023) >> 10)) MiB more than the $((limit >> 10)) that travel" >&2; exit 1; }
