"""effects.json is read as what it says, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.common.errors import UsageError
from kvbench.effects.comparison import Call
from kvbench.metrics.definitions import ENGINE, SIMULATED
from kvbench.metrics.model import LoadOutcome
from kvbench.runs.engine_time import EFFECTS, FOLDER, EngineTime, read_engine_time
from kvbench.runs.results import LoadResult

ROW = {"cell": "a-c3", "metric": "p95_ttft_ms", "ratio": 1.2, "low": 1.1, "high": 1.3, "call": "behind", "launches": 4}
WHOLE = {"format": 2, "turns": {"c3": {"turn_steps": 1, "cold_cost": 0.01}}, "effects": [ROW]}


def read(tmp_path: Path, **changes: Any) -> EngineTime | None:
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    (tmp_path / FOLDER / EFFECTS).write_text(json.dumps(WHOLE | changes))
    return read_engine_time(tmp_path)


def test_a_call_of_an_older_version_is_read_in_todays_words(tmp_path: Path) -> None:
    stored = read(tmp_path)
    assert stored is not None and stored.finished and stored.turns["c3"].cold_cost == 0.01
    comparison = stored.of("a-c3", "p95_ttft_ms")
    assert comparison is not None and comparison.call == Call.WORSE and comparison.clock == ENGINE
    assert (comparison.ratio, comparison.low, comparison.high, comparison.n) == (1.2, 1.1, 1.3, 4)
    assert stored.of("a-c3", "p95_itl_ms") is None


@pytest.mark.parametrize("changes", [{"format": 1}, {"effects": []}])
def test_the_first_format_and_no_effects_are_nothing_measured(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes) is None and read_engine_time(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 3}, "format is 3, and this kvbench reads 2"),
        ({"turns": {"c3": None}}, "turns"),
        ({"effects": [ROW | {"ratio": 0}]}, "ratio"),
        ({"effects": [ROW | {"low": [1]}]}, "low"),
        ({"effects": [ROW | {"low": 1.31}]}, "interval"),
        ({"effects": [ROW | {"metric": "p95_ttfd_ms"}]}, "p95_ttfd_ms"),
        ({"effects": [ROW | {"call": "sideways"}]}, "sideways"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        read(tmp_path, **changes)
    assert EFFECTS in str(refused.value) and "measures it anew" in str(refused.value)


@pytest.mark.parametrize(("stored", "clock"), [("engine", ENGINE), (ENGINE, ENGINE), ("simulated", SIMULATED)])
def test_a_load_in_engine_time_is_read_and_stored_by_the_word_of_older_versions(stored: str, clock: str) -> None:
    for record in (LoadResult.parse({"metrics": {}, "clock": stored}), LoadOutcome.parse({"clock": stored})):
        assert record.clock == clock
        assert record.to_json()["clock"] == ("engine" if clock == ENGINE else clock)
