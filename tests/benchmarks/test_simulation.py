"""How fast a load is simulated: requests a minute on one core at 256 running sequences, 325 tokens each.

Run with ``make bench``. The floor of the design is 20,000 requests a minute.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bench_timing import choose, note

from kvbench.simulation.run import SimulationJob, simulate
from kvbench.workload.file import SimulateSection
from kvbench.workload.load_section import LoadConfig, load_point

USERS = choose(full=256, quick=256, smoke=4)
REQUESTS = choose(full=2000, quick=1000, smoke=8)
ROUNDS = choose(full=3, quick=1, smoke=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix caching"])
@pytest.mark.parametrize("keeps", [False, True], ids=["figures", "figures and requests.parquet"])
def test_simulation(benchmark, tmp_path: Path, caching: bool, keeps: bool) -> None:
    lengths = {"prompt_tokens": [20, 300], "output_tokens": [50, 600]}
    prompts = {"kind": "synthetic", "classes": [{"name": "random", "share": 1.0, **lengths}]}
    load = LoadConfig.model_validate({"concurrency": [USERS], "num_requests": [REQUESTS], "prompts": prompts})
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 8192}
    job = SimulationJob(
        "bench", SimulateSection(device="A100-80GB", tensor_parallel=4), "llama-3.1-70b",
        {**settings, "enable_prefix_caching": caching}, load,
        load_point("closed", concurrency=USERS, rate=None, num_requests=REQUESTS), seed=0,
        folder=tmp_path if keeps else None,
    )  # fmt: skip
    seconds = []

    def one() -> None:
        begun = time.process_time()
        assert simulate(job).figures.completed == REQUESTS
        seconds.append(time.process_time() - begun)

    benchmark.group = "a load of 256 users simulated on one core"
    benchmark.pedantic(one, rounds=ROUNDS, iterations=1)
    note(benchmark, requests_per_minute=60 * REQUESTS / min(seconds))
