"""The version of a stored file: which kinds may lack it, and what is said of one that is not known."""

import pytest

from kvbench.claims.results import ClaimsResult
from kvbench.gate.compare.folder import CompareState
from kvbench.gate.compare.served_check import ServedRounds
from kvbench.gate.timing.noise import RunnerNoise
from kvbench.runs.engine_time import EngineTime
from kvbench.runs.predictions import Predictions
from kvbench.runs.quality import QualityResult
from kvbench.runs.results import CellSummary, LoadResult, Manifest

WITH_FORMAT = (
    ClaimsResult,
    CompareState,
    EngineTime,
    Manifest,
    Predictions,
    QualityResult,
    RunnerNoise,
    ServedRounds,
)


@pytest.mark.parametrize("kind", [CellSummary, LoadResult])
def test_loads_and_cells_of_older_versions_lack_a_format(kind):
    whole = {"valid": True, "invalid_reasons": [], "metrics": {}, "server": {}, "started_at": "", "ended_at": ""}
    assert kind.parse(whole).to_json()["format"] == kind.FORMAT


@pytest.mark.parametrize("kind", WITH_FORMAT)
def test_other_files_always_had_a_format(kind):
    with pytest.raises(ValueError, match=f"format is None, and this kvbench reads {kind.FORMAT!r}"):
        kind.parse({})


@pytest.mark.parametrize("kind", [CellSummary, LoadResult, *WITH_FORMAT])
@pytest.mark.parametrize("format", [99, "99", None, [1]])
def test_an_unknown_format_is_said(kind, format):
    with pytest.raises(ValueError, match=r"format is .*, and this kvbench reads"):
        kind.parse({"format": format})
