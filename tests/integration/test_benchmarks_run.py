"""Every benchmark runs once, tiny, and `make bench`'s table is made of it: benchmarks that nobody runs rot."""

import json

import pytest

from tests.benchmarks import bench_run

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run

# What the figures are is the benchmarks' own business; that they are there, finite and positive is checked here.
FIGURES = {
    "test_decode": ("kv_gb_per_s", "ceiling_gb_per_s", "ratio"),
    "test_decode_of_many_layers": ("kv_gb_per_s", "ceiling_gb_per_s", "ratio"),
    "test_prefill": ("gflop_per_s", "ceiling_gflop_per_s", "ratio"),
    "test_write": ("gb_per_s", "ceiling_gb_per_s", "ratio", "vs_copy"),
    "test_move": ("moved_gb_per_s", "ceiling_gb_per_s", "ratio", "vs_copy"),
    "test_engine": ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "steps", "execute_pct"),
    "test_phases": ("step_ms", "execute_pct", "clock_pct"),
    "test_prefix_caching": ("gain", "hit_rate"),
    "test_peers": ("vs hf-continuous", "vs hf-static"),
    "test_decode_step_by_running_sequences": ("us_per_step",),
    "test_hashing": ("ns_per_token",),
    "test_allocate_and_release": ("ns_per_page",),
    "test_server_start": ("start_s",),
    "test_simulation": ("requests_per_minute",),
    "test_load_client": ("lag_p99_ms", "itl_error_p99_ms", "cpu_us_per_event"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of one run of all benchmarks."""
    output_dir = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_BENCH", "smoke")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # other tests' threads may want the cores as well
        patch.delenv("VLLM_PYTHON", raising=False)
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)  # under which pytest-benchmark measures nothing
        assert bench_run.main([], output_dir) == 0
    (folder,) = (output_dir / "bench").iterdir()
    return folder


@pytest.fixture(scope="module")
def rows(run):
    return bench_run.read_rows(run / "bench.json")


@pytest.mark.parametrize("test", FIGURES)
def test_every_benchmark_has_its_figures(rows, test):
    mine = [row for row in rows if row.test == test]
    assert mine
    for row in mine:
        assert row.min_s > 0 and row.device
        for figure in FIGURES[test]:
            assert 0 < row.figures[figure] < 1e12, (row, figure)


def test_all_layouts_and_a_quantised_cache_are_there(rows):
    decodes = {(row.params["kv"], row.params["page_size"]) for row in rows if row.test == "test_decode"}
    assert {page for _, page in decodes} == {16, 0} and len({kv for kv, _ in decodes}) == 2


def test_peers_give_the_same_tokens(rows):
    (peers,) = (row.figures for row in rows if row.test == "test_peers")
    assert peers["same as hf-continuous"] == peers["same as hf-static"] == 1.0


def test_phases_of_a_step_add_up_to_nearly_all_of_it(rows):
    (phases,) = (row.figures for row in rows if row.test == "test_phases")
    names = ("schedule", "prepare", "execute", "sample", "output")
    assert 50 < sum(phases[f"{name}_pct"] for name in names) <= 101


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
