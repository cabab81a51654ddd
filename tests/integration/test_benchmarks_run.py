"""Every benchmark runs once, tiny, and `make bench`'s table is made of it: benchmarks that nobody runs rot."""

import json

import pytest

from tests.benchmarks import bench_run

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run

# By file. What the figures are is the benchmarks' own business; that they are there, finite and positive is checked.
FIGURES = {
    "kernels": {
        "test_decode": ("kv_gb_per_s", "ceiling_gb_per_s", "ratio"),
        "test_decode_of_many_layers": ("kv_gb_per_s", "ceiling_gb_per_s", "ratio"),
        "test_prefill": ("gflop_per_s", "ceiling_gflop_per_s", "ratio"),
        "test_write": ("gb_per_s", "ceiling_gb_per_s", "ratio", "vs_copy"),
    },
    "kv_moves": {"test_move": ("moved_gb_per_s", "ceiling_gb_per_s", "ratio", "vs_copy")},
    "engine": {
        "test_engine": ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "steps", "execute_pct"),
        "test_phases": ("step_ms", "execute_pct", "clock_pct"),
    },
    "prefix_caching": {"test_prefix_caching": ("gain", "hit_rate")},
    "peers": {"test_peers": ("vs hf-continuous", "vs hf-static")},
    "step_cost": {
        "test_decode_step_by_running_sequences": ("us_per_step",),
        "test_prefixes": ("ns_per_token",),
        "test_allocate_and_release": ("ns_per_page",),
    },
    "server_start": {"test_server_start": ("start_s",)},
    "server_health": {"test_health_at_full_load": ("health_p50_ms", "idle_p50_ms", "output_tokens_per_s")},
    "server_streams": {
        "test_steps_beside_streams": ("step_ms", "itl_ms", "server_cores"),
        "test_tokens_beside_streams": ("output_tokens_per_s",),
    },
    "simulation": {"test_simulation": ("requests_per_minute",)},
    "load_client": {"test_load_client": ("lag_p99_ms", "itl_error_p99_ms", "cpu_us_per_event")},
}


@pytest.fixture(scope="module", params=["step_cost", pytest.param("all", marks=pytest.mark.full)])
def files(request):
    """The benchmarks that run: without engine and servers, and all."""
    return list(FIGURES) if request.param == "all" else [request.param]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """The folder of one run."""
    output_dir = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_BENCH", "smoke")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # other tests' threads may want the cores as well
        patch.delenv("VLLM_PYTHON", raising=False)
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)  # under which pytest-benchmark measures nothing
        chosen = [] if len(files) > 1 else [str(bench_run.BENCHMARKS / f"test_{files[0]}.py")]
        assert bench_run.main(chosen, output_dir) == 0
    (folder,) = (output_dir / "bench").iterdir()
    return folder


@pytest.fixture(scope="module")
def rows(run):
    return bench_run.read_rows(run / "bench.json")


def test_every_benchmark_has_its_figures(files, rows):
    assert {row.file for row in rows} == set(files)
    for test, figures in (item for file in files for item in FIGURES[file].items()):
        mine = [row for row in rows if row.test == test]
        assert mine, test
        for row in mine:
            assert row.min_s > 0 and row.device
            for figure in figures:
                assert 0 < row.figures[figure] < 1e12, (row, figure)


@pytest.mark.parametrize("files", [pytest.param("all", marks=pytest.mark.full)], indirect=True)
def test_layouts_peers_and_phases_are_whole(rows):
    decodes = {(row.params["kv"], row.params["page_size"]) for row in rows if row.test == "test_decode"}
    assert {page for _, page in decodes} == {16, 0} and len({kv for kv, _ in decodes}) == 2
    (peers,) = (row.figures for row in rows if row.test == "test_peers")
    assert peers["same as hf-continuous"] == peers["same as hf-static"] == 1.0
    (phases,) = (row.figures for row in rows if row.test == "test_phases")
    assert 50 < sum(phases[f"{name}_pct"] for name in ("schedule", "prepare", "execute", "sample", "output")) <= 101


def test_a_word_of_an_expression_is_not_taken_for_a_path():
    assert bench_run.names_benchmarks(["-q", "tests/benchmarks/test_kernels.py::test_decode"])
    assert bench_run.names_benchmarks([str(bench_run.BENCHMARKS)])
    assert not bench_run.names_benchmarks(["-k", "kernels", "--durations=3"])  # there is a folder of that name
    assert not bench_run.names_benchmarks(["-k", "tests/benchmarks/nothing.py"])


def test_the_folder_tells_what_it_is(run, rows):
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["mode"] == "smoke" and manifest["benchmarks"] == len(rows)
    assert manifest["versions"]["torch"] and manifest["cpu"]["cores"] and manifest["ended"] >= manifest["started"]
    text = (run / "table.md").read_text()
    assert "## Bars" in text and "| phase clock: % of a step | <= 1 |" in text
    assert all(f"## {group}" in text for group in {row.group for row in rows})
    stored = json.loads((run / "bench.json").read_text())
    assert stored["machine_info"]["node"] == stored["machine_info"]["machine"]  # no host name
