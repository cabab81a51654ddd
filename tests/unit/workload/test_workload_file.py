"""From YAML to a resolved workload, and a clear sentence for everything that can be wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.sweep.plan import preflight
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import differing_keys, load_workload, resolve

WORKLOADS = Path(__file__).resolve().parents[3] / "workloads"
GOOD = {
    "name": "tiny",
    "model": {"config": "llama-32m"},
    "engine": {"layout": "paged", "page_size": 16, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8},
    "sweep": {"layout": ["contiguous"]},
    "load": {
        "concurrency": [1, 4],
        "num_requests": 8,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "a", "share": 1.0, "prompt_tokens": [4, 32], "output_tokens": [4, 12]}],
        },
    },
    "profiles": {
        "cpu": {"engine": {"max_num_seqs": 4}},
        "gpu": {"model": {"config": "llama-3.1-8b", "dtype": "bfloat16"}, "load": {"concurrency": [8]}},
    },
}


def write(tmp_path, data):
    path = tmp_path / "w.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), errors="surrogateescape")
    return path


def changed(dotted, value):
    """GOOD with one value replaced (``...`` removes it)."""
    data = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = dotted.split(".")
    node = data
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return data


def check(path, **options):
    """Everything that happens before a launch."""
    workload = load_workload(path, profile="cpu", **options)
    design, _ = plan_sweep(workload)
    preflight(workload, design, check_configuration)
    return workload


def test_profile_then_overrides_then_options(tmp_path):
    path = write(tmp_path, GOOD)
    assert load_workload(path, profile="cpu").engine["max_num_seqs"] == 4
    gpu = load_workload(path, profile="gpu")
    assert gpu.engine["model"] == "llama-3.1-8b" and gpu.engine["dtype"] == "bfloat16"
    assert gpu.load.concurrency == (8,)  # a list replaces, it does not merge
    workload = load_workload(
        path, profile="cpu", overrides=["engine.max_num_seqs=7", "load.concurrency=[2, 3]", "load.repeats=9"],
        seed=5, repeats=2,
    )  # fmt: skip
    assert workload.engine["max_num_seqs"] == 7 and workload.load.concurrency == (2, 3)
    assert workload.seed == 5 and workload.load.repeats == 2


def test_overrides_reach_into_lists_and_make_missing_sections(tmp_path):
    path = write(tmp_path, GOOD)
    overrides = ["load.prompts.classes.0.name=renamed", "load.slo.ttft_ms=100.0", "sweep={}"]
    workload = load_workload(path, profile="cpu", overrides=overrides)
    assert workload.load.prompts.classes[0].name == "renamed"
    assert workload.load.slo.ttft_ms == 100.0 and workload.sweep == {}
    same = load_workload(path, profile="cpu", overrides=[*overrides[:2], "sweep=null"])
    assert same.resolved == workload.resolved


def test_a_mapping_of_another_kind_replaces_instead_of_merging(tmp_path):
    text = {"kind": "text", "file": "f", "prompt_tokens": 4, "output_tokens": 4}
    data = changed("profiles.cpu", {"load": {"prompts": text}, "model": {"path": str(tmp_path)}})
    workload = load_workload(write(tmp_path, data), profile="cpu")
    assert workload.load.prompts.kind == "text" and workload.engine["model"] == str(tmp_path)
    assert load_workload(write(tmp_path, data), profile="gpu").load.prompts.kind == "synthetic"


def test_what_is_stored_resolves_to_the_same_workload(tmp_path):
    workload = load_workload(write(tmp_path, GOOD), profile="cpu", overrides=["engine.page_size=32"])
    again = resolve(workload.resolved, profile="cpu", source=workload.source)
    assert again == workload
    other = load_workload(write(tmp_path, GOOD), profile="cpu", overrides=["seed=4", "load.timeout_s=9"])
    assert differing_keys(workload.resolved, other.resolved) == ["engine.page_size", "load.timeout_s", "seed"]


def test_paths_are_looked_for_beside_the_file_first(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "lines.txt").write_text("beside\n")
    (tmp_path / "lines.txt").write_text("working folder\n")
    monkeypatch.chdir(tmp_path)
    prompts = {"kind": "text", "file": "lines.txt", "prompt_tokens": 4, "output_tokens": 4}
    path = write(tmp_path / "here", changed("load.prompts", prompts))
    assert load_workload(path, profile="cpu").load.prompts.file == str(tmp_path / "here" / "lines.txt")
    (tmp_path / "here" / "lines.txt").unlink()
    assert load_workload(path, profile="cpu").load.prompts.file == str(tmp_path / "lines.txt")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed("engine.pagesize", 16), ["'pagesize'", "did you mean 'page_size'"]),
        (changed("load.concurency", [1]), ["`concurency`", "did you mean `concurrency`"]),
        (changed("engine.page_size", 0), ["page_size", "0", "at least 1"]),
        (changed("engine.kv_budget", "48MiBB"), ["'48MiBB'", "MiB"]),
        (changed("engine.kv_budget", "1MiB"), ["1048576", "smaller than one sequence", "256", "raise kv_budget"]),
        (changed("engine.max_model_len", 10**7), ["max_model_len 10000000", "llama-32m", "lower"]),
        (changed("engine.max_model_len", 32), ["max_model_len 32", "class 'a'", "shorten"]),
        (changed("engine.layout", "pagged"), ["layout", "'pagged'", "paged, contiguous"]),
        (changed("sweep.page_size", []), ["sweep.page_size", "empty"]),
        (changed("sweep.page_sizes", [1]), ["'page_sizes'", "did you mean 'page_size'"]),
        (changed("model.config", "llama-33m"), ["llama-33m", "llama-32m"]),
        (changed("model", {"path": "/nowhere/model"}), ["/nowhere/model", "does not exist"]),
        (changed("model.path", "/nowhere"), ["both config and path"]),
        (changed("load", ...), ["load", "missing"]),
        (changed("engine.page_size", [16]), ["engine.page_size", "[16]"]),
        (changed("engine.seed", 1), ["engine.seed", "model:"]),
        ("name: \udcff\n", ["cannot be read"]),
        ("", ["empty"]),
        ("- a\n", ["a list"]),
        ("name: [x\n", ["not valid YAML", "line"]),
        ("name: a\nname: b\n", ["'name' stands twice", "line 2"]),
    ],
)
def test_bad_files_are_refused_with_value_and_way_out(tmp_path, data, words):
    with pytest.raises(UsageError) as error:
        check(write(tmp_path, data))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.page_size", ["key=value"]),
        ("=3", ["key=value"]),
        ("engine.page_size=[1", ["'[1'", "YAML"]),
        ("name.x=1", ["name", "'tiny'"]),
        ("load.prompts.classes.4.share=1", ["'4'", "0 to 0"]),
        ("load.repeats=0", ["repeats", "0"]),
    ],
)
def test_bad_overrides(tmp_path, override, words):
    with pytest.raises(UsageError) as error:
        check(write(tmp_path, GOOD), overrides=[override])
    assert all(word in str(error.value) for word in words), error.value


def test_missing_files_and_profiles_name_what_there_is(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(UsageError, match=r"there is no workload file .*did you mean .*w\.yaml"):
        load_workload(tmp_path / "ww.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        load_workload(tmp_path)
    with pytest.raises(UsageError, match=r"no profile 'tpu'.*cpu, gpu"):
        load_workload(tmp_path / "w.yaml", profile="tpu")


SWEPT = sorted(path for path in WORKLOADS.glob("*.yaml") if path.stem != "ci_counters")
MEASURED = [path for path in SWEPT if "\nsimulate:" not in path.read_text()]


def test_a_workload_of_the_counter_gate_is_told_apart():
    with pytest.raises(UsageError, match="it is made for `kvbench gate counters`"):
        load_workload(WORKLOADS / "ci_counters.yaml")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_the_cpu_profile_measures_the_cpu_on_any_machine(path):
    assert load_workload(path, profile="cpu").engine["device"] == "cpu"
    assert "device" not in load_workload(path, profile="gpu").engine


@pytest.mark.parametrize("name", ["mixed", "uniform"])
def test_shipped_workloads_pass_every_check(name):
    workload = check(f"workloads/{name}.yaml")
    design, _ = plan_sweep(workload)
    lowest, highest = workload.load.concurrency
    contiguous = next(c for c in design.configurations if c.settings["layout"] == "contiguous")
    holds = check_configuration(contiguous.settings).max_concurrency_at_max_len
    assert lowest <= holds < highest  # the low load fits either layout, the high one does not
    budgets = {check_configuration(c.settings).kv_budget_bytes for c in design.configurations}
    assert len(budgets) == 1
    load_workload(f"workloads/{name}.yaml", profile="gpu")


def test_a_model_folder_takes_the_place_of_the_file_s_model(tmp_path):
    """As the README has it; the weights are the folder's own, and no random ones."""

    def model(*overrides: str) -> tuple[str, str]:
        engine = load_workload(WORKLOADS / "mixed.yaml", profile="cpu", overrides=overrides).engine
        return engine["model"], engine["load_format"]

    assert model(f"model.path={tmp_path}") == (str(tmp_path), "auto")
    assert model(f"model.path={tmp_path}", "model.config=llama-32m") == ("llama-32m", "dummy")
