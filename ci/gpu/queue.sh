#!/usr/bin/env bash
# Runs an entry of docs/gpu.md's queue with what ci/gpu/bring.sh has put into .bring; with --tiny stand-ins of the peers.
#
#   ci/gpu/queue.sh NAME OUTDIR [options of ci/gpu.sh]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ $# -ge 2 ] || { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
name="$1" outdir="$2" bring="$root/.bring" more=(); shift 2
[ ! -d "$bring/wheels" ] || more+=(--wheels "$bring/wheels")
if [[ "$name" = peers && " $* " == *" --tiny "* ]]; then
  export KVBENCH_PEERS="$root/tests/support/fake_peers"
elif [[ "$name" = peers && -d "$bring/peers" ]]; then
  peers="$bring/unpacked"
  mkdir -p "$peers"
  export KVBENCH_PEERS="$peers/site:$peers/flashinfer" FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE="$peers"
  PEER_PARTS="$peers/parts" bash "$bring/peers/join_peers.sh" "$bring/peers" "$peers/site" \
    || echo "vLLM could not be unpacked: peer-job will fail, and FlashInfer lacks what it shares with it" >&2
  { mkdir -p "$peers/flashinfer" && tar -xJf "$bring/peers/flashinfer.tar.xz" -C "$peers/flashinfer"; } \
    || echo "FlashInfer could not be unpacked: its kernels are left out" >&2
  if [ ! -d "$peers/flashinfer/flashinfer/data/aot" ]; then  # compiling would take all of the part's time
    echo "FlashInfer's kernels were not compiled by ci/gpu/bring.sh: they are left out" >&2
    export KVBENCH_PEERS="$peers/site"
  fi
fi
exec "$root/ci/gpu.sh" "$outdir" --entry "$name" "${more[@]}" "$@"
