#!/usr/bin/env bash
# Tries an installed kvbench in an empty folder: plan, simulate, gate, load, compare, report. Any system, 2 minutes.
#   ci/smoke.sh            the light core
#   ci/smoke.sh engine     also a sweep of the built-in engine (3 minutes)
set -euo pipefail
folder=$(mktemp -d)
cd "$folder"
server=
clean() {
  if [ -n "$server" ]; then kill "$server" || true; fi
  rm -rf "$folder"
}
trap clean EXIT
measure() {  # a shared machine may disturb a load (4) or leave a comparison undecided (3)
  code=0
  "$@" || code=$?
  case "$code" in 0 | 3 | 4) ;; *) return 1 ;; esac
}

kvbench --version
kvbench plan mixed > plan.txt
kvbench init my.yaml --from mixed
kvbench sweep my.yaml --dry-run > dry-run.txt 2>&1 || grep -q 'kvbench\[engine\]' dry-run.txt
kvbench gate counters --only 'async-forks/*'
kvbench simulate --device H200 --model llama-3.1-8b --input-len 64 --output-len 16 --concurrency 4 --num-prompts 16

kvbench dev mock-server --port 0 --ttft-ms 20 --itl-ms 5 > server.txt &
server=$!
for _ in $(seq 600); do
  if grep -q ready server.txt; then break; fi
  sleep 0.1
done
url=$(sed -n 's/^ready //p' server.txt)
measure kvbench load --url "$url" --input-len 64 --output-len 16 --concurrency 4 --num-prompts 64 --output-dir load
python3 -c "import json; assert json.load(open('load/metrics.json'))['completed'] == 64"
kvbench init load.yaml --input-len 64 --output-len 16 --concurrency 4 --num-prompts 64
measure kvbench compare "$url" "$url" --workload load.yaml --max-minutes 2
test -n "$(find results/compare -name done.json)"
kvbench report load
kill "$server"
wait "$server" || true
server=

if [ "${1:-}" = engine ]; then
  measure kvbench sweep --input-len 16:64 --output-len 16 --concurrency 4 --vary layout=contiguous,paged \
    -o engine.kv_budget=32MiB --repeats 1 --no-quality --lockstep-minutes 0.5 --output-dir swept
  test "$(find swept -name done.json | wc -l)" -ge 2
fi
echo "kvbench works here: $(python3 -c 'import platform; print(platform.platform(), platform.python_version())')"
