"""``kvbench simulate``: one load or trace on a machine, or a fleet, that need not be here."""

from __future__ import annotations

from kvbench.common.options import takes
from kvbench.simulation.request import SimulateRequest


@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> int:
    """Run one load or trace on a machine that is not here.

    The machine may be a fleet.

    The engine is the built-in one, with its scheduler, page pool, prefix cache and swap; only its tensors are replaced,
    by a cost model of the device, and its clock, by a virtual one. All figures are simulated: nothing is measured.

    The load is one of WORKLOAD, or without a file the one that --input-len, --output-len and --concurrency make, or the
    trace of --dataset-path at its own times. The same options give the same bytes.

    \b
    Examples:
      kvbench simulate --device H200 --model llama-3.1-8b --input-len 600 --output-len 150 --concurrency 64
      kvbench simulate --device 4xA100-80GB --model llama-3.1-70b --dataset-path conversation_trace.jsonl
      kvbench simulate workloads/mixed.yaml --device L4 --at c256 -o engine.enable_prefix_caching=true
      kvbench simulate workloads/mixed.yaml --device L4 --request-rate 2,4,8 --output-dir out
      kvbench simulate workloads/conversations.yaml --device H200 --model llama-3.1-8b --replicas 4
          --router round-robin --router least-loaded --router prefix-aware
      kvbench simulate workloads/mixed.yaml --device L4 --replicas 1,2,4 --find-max-rate 'p95_ttft<=500ms'
    \b
    Files written, with --output-dir only (of several simulations in a folder each):
      summary.json        the figures, and what was simulated with which cost model
      requests.parquet    one row a request, in the order of their ends, as `kvbench load` has them
    \b
    Exit codes: 0 simulated; 2 bad input, or a model that does not fit; 4 a simulation failed; 130 interrupted.
    """
    from kvbench.simulation.command import simulate_command

    return simulate_command(request)
