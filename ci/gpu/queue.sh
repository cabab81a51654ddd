#!/usr/bin/env bash
# Runs an entry of docs/gpu.md's queue with what ci/gpu/bring.sh has put into .bring; with --tiny stand-ins of the peers.
#
#   ci/gpu/queue.sh NAME OUTDIR [options of ci/gpu.sh]
# NAME: peers, vllm-pairs, settings, before-after, sharpness, long, windows or latent
# Exit codes: as of ci/gpu.sh, 0 passed, 1 a part failed or none ran, 2 usage or no GPU.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
usage() { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
name="$1" outdir="$2" bring="$root/.bring" more=(); shift 2
[ ! -d "$bring/wheels" ] || more+=(--wheels "$bring/wheels")
needs_peers=false; case "$name" in peers | vllm-pairs) needs_peers=true ;; esac
if $needs_peers && [[ " $* " == *" --tiny "* ]]; then
  export KVBENCH_PEERS="$root/tests/support/fake_peers"
elif $needs_peers && [ -d "$bring/peers" ]; then
  peers="${TMPDIR:-/tmp}/kvbench-peers-$(cksum < "$bring/peers/SHA256SUMS" | cut -d' ' -f1)"  # kept for the next run
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
