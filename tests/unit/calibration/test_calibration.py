"""What a calibration concludes from given samples, how it is cached, and what the command says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from kvbench.calibration import calibrate as module
from kvbench.calibration.calibrate import (
    Attempt,
    CalibrationFigures,
    CalibrationSettings,
    ClientCalibration,
    Limits,
    aims,
    figures_of,
    judge_figures,
    validity_limits,
)
from kvbench.calibration.mock.process import MockProcess
from kvbench.calibration.mock.settings import Stamp
from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError
from kvbench.common.foreign_cpu import MachineReport
from kvbench.metrics.model import ClientFigures

ZERO = 1000.0
CLIENT = ClientFigures(
    cpu_us_per_chunk=20.0, cpu_fraction=0.1, loop_lag_p99_ms=0.3, turnaround_p50_ms=6.0, priority="nice -10"
)
SETTINGS = CalibrationSettings(streams=2)


def stamp(index: int, sends: list[float], fault: str = "") -> Stamp:
    due = [ZERO + s - 0.0005 for s in sends]
    return Stamp(index, [1, 2, index], ZERO, fault, [], {}, sends=[ZERO + s for s in sends], due=due)


def row(index: int, times: list[float], *, ok: bool = True, user: int = 0, ts: float = 0.0, end: float = 0.0) -> dict:
    return {"index": index, "chunk_times": np.array(times), "ok": ok, "user": user, "ts": ts, "end": end}


def figures(rows: list[dict], stamps: list[Stamp], planned: int | None = None) -> CalibrationFigures:
    return figures_of(pd.DataFrame(rows), stamps, CLIENT, ZERO, len(stamps) if planned is None else planned)


def test_lag_and_gaps_against_numpy() -> None:
    rng = np.random.default_rng(0)
    sends = [np.cumsum(rng.uniform(0.01, 0.03, 40)) for _ in range(3)]
    lags = [rng.uniform(0.0, 0.002, 40) for _ in range(3)]
    got = figures(
        [row(i, list(s + d)) for i, (s, d) in enumerate(zip(sends, lags, strict=True))],
        [stamp(i, list(s)) for i, s in enumerate(sends)],
    )
    pooled = np.concatenate(lags) * 1000
    errors = np.abs(np.concatenate([np.diff(d) for d in lags])) * 1000
    assert got.lag_p50_ms == pytest.approx(np.percentile(pooled, 50), rel=1e-6)
    assert got.lag_p99_ms == pytest.approx(np.percentile(pooled, 99), rel=1e-6)
    assert got.itl_error_p99_ms == pytest.approx(np.percentile(errors, 99), rel=1e-6)
    assert (got.events, got.events_lost, got.coalesced_share) == (120, 0, 0.0)
    assert got.server_late_p99_ms == pytest.approx(0.5)
    assert (got.cpu_us_per_event, got.priority, got.turnaround_p50_ms) == (20.0, "nice -10", 6.0)


def test_stamps_that_are_too_early_are_errors() -> None:
    """10 ms early: the smallest errors of all, were they not taken by their size."""
    sends = [0.02 * i for i in range(200)]
    got = figures([row(0, [s - 0.010 for s in sends])], [stamp(0, sends)])
    assert (got.lag_p50_ms, got.lag_p99_ms) == (pytest.approx(-10.0), pytest.approx(10.0))
    said = judge_figures(got, validity_limits(20.0), SETTINGS)
    assert "its timestamps are wrong: p99 10.00 ms, the limit is 1 ms" in said[0]


def test_chunks_with_one_receipt_count_only_if_they_were_sent_apart() -> None:
    got = figures([row(0, [0.5, 0.5, 0.5, 0.6])], [stamp(0, [0.4, 0.4001, 0.49, 0.59])])
    assert got.coalesced_share == pytest.approx(1 / 4)


def test_every_kind_of_loss_is_counted() -> None:
    rows = [
        row(0, [0.1, 0.2]),  # all is well
        row(1, [0.1]),  # one chunk lost
        row(2, [0.1, 0.2], ok=False),  # whole, but counted as a failure
        row(3, [0.1]),  # cut off, but counted as a success
        row(4, [0.1], ok=False),  # cut off, and counted as such
    ]
    stamps = [stamp(i, [0.1, 0.2]) for i in range(3)]
    stamps += [stamp(3, [0.1], "truncate"), stamp(4, [0.1], "truncate"), stamp(5, [0.1, 0.2]), stamp(0, [0.1, 0.2])]
    got = figures(rows, stamps, planned=8)
    assert got.events_lost == 1 + 2
    assert got.requests_lost == 8 - 5  # 5 left no row, 6 and 7 were never sent
    assert got.requests_repeated == 1
    assert (got.faults, got.faults_counted, got.whole_failed) == (2, 1, 1)
    said = " ".join(judge_figures(got, validity_limits(20.0), SETTINGS))
    for words in ("3 requests were lost", "1 requests were sent again", "3 chunks", "1 streams that the server cut off",
                  "1 streams that the server sent whole"):  # fmt: skip
        assert words in said


GOOD = CalibrationFigures(
    events=1000, events_lost=0, requests=10, requests_lost=0, requests_repeated=0, faults=2, faults_counted=0,
    whole_failed=0, lag_p50_ms=0.1, lag_p99_ms=0.4, itl_error_p99_ms=0.3, coalesced_share=0.0, turnaround_p50_ms=0.2,
    cpu_us_per_event=25.0, cpu_fraction=0.2, loop_lag_p99_ms=0.5, server_late_p99_ms=0.2, priority="realtime",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "valid", "aimed"),
    [
        ({}, "", ""),
        ({"lag_p99_ms": 0.8}, "", "timestamps are wrong: p99 0.80 ms, the limit is 0.7 ms"),
        ({"lag_p99_ms": 1.2}, "timestamps are wrong: p99 1.20 ms, the limit is 1 ms", "timestamps are wrong"),
        ({"itl_error_p99_ms": 0.6}, "", "wrong gaps: p99 error 0.60 ms, the limit is 0.5 ms"),
        ({"itl_error_p99_ms": 1.1}, "wrong gaps: p99 error 1.10 ms, the limit is 1 ms", "wrong gaps"),
        ({"cpu_us_per_event": 31.0}, "", "takes 31.0 us of CPU an event, the limit is 30 us"),
        ({"coalesced_share": 0.002}, "", "0.20% of the chunks were read together"),
        (
            {"coalesced_share": 0.02},
            "2.00% of the chunks were read together with the one before, the limit is 1.0%",
            "",
        ),
        ({"cpu_fraction": 0.8}, "used 80% of a core, the limit is 70%", ""),
        ({"turnaround_p50_ms": 7.0}, "users wait 7.0 ms", "users wait 7.0 ms"),
        ({"faults": 0}, "no stream was cut off", "no stream was cut off"),
        ({"lag_p99_ms": None}, "nothing is known of its timestamps", "nothing is known"),
    ],
)
def test_limits(change: dict, valid: str, aimed: str) -> None:
    settings = CalibrationSettings(streams=64, itl_ms=20.0)
    found = dataclasses.replace(GOOD, **change)
    for words, limits in ((valid, validity_limits(20.0)), (aimed, aims(settings))):
        reasons = judge_figures(found, limits, settings)
        assert words in " ".join(reasons)
        if not valid and not aimed:
            assert reasons == ()
    assert judge_figures(found, validity_limits(20.0), settings) == () or valid


def test_the_lag_that_is_valid_grows_with_the_itl() -> None:
    assert validity_limits(20.0).lag_p99_ms == 1.0
    assert validity_limits(200.0).lag_p99_ms == validity_limits(200.0).itl_error_p99_ms == pytest.approx(4.0)
    assert aims(CalibrationSettings(4, 20.0)).cpu_us_per_event is None  # too few events to outweigh the rest


def taken(settings: CalibrationSettings, reasons: tuple[str, ...] = ()) -> ClientCalibration:
    attempts = (Attempt(GOOD, reasons, 0.05, 0.0),)
    return ClientCalibration(
        settings, GOOD, Limits(1.0), reasons, module.machine_key(), "2026-01-01T00:00:00Z", attempts
    )


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 64])
def test_a_calibration_lasts_as_long_as_was_asked_for_and_has_more_whole_streams_than_spoilt_ones(streams: int) -> None:
    settings = CalibrationSettings(streams, itl_ms=20.0, seconds=4.0)
    assert settings.requests >= 8 and settings.requests % streams == 0
    tokens = [settings.tokens_of(request) for request in range(settings.requests)]
    assert sum(tokens) / streams * 0.020 == pytest.approx(4.0, rel=0.1)
    assert len(set(tokens[:streams])) == streams  # the first streams end at moments of their own
    of_a_user = [sum(lengths) for lengths in zip(tokens[:streams], tokens[streams : 2 * streams], strict=True)]
    assert max(of_a_user) - min(of_a_user) <= 1  # all users are busy until the end


@pytest.mark.parametrize(("good_from", "attempts", "tried"), [(1, 3, 1), (2, 3, 2), (9, 3, 3), (9, 1, 1)])
def test_another_attempt_only_after_a_failure(monkeypatch, good_from: int, attempts: int, tried: int) -> None:
    measured(monkeypatch, *({"lag_p99_ms": 0.1 if n >= good_from else 9.0} for n in range(1, 10)))
    got = module.calibrate(SETTINGS, attempts=attempts)
    assert len(got.attempts) == tried and bool(got.reasons) == (good_from > tried)
    assert [bool(each.reasons) for each in got.attempts] == [n < good_from for n in range(1, tried + 1)]


def measured(monkeypatch: pytest.MonkeyPatch, *changes: dict, foreign: float = 0.0, steal: float = 0.0) -> None:
    """What the attempts find, one after the other, and how the machine is meanwhile."""
    found = iter([dataclasses.replace(GOOD, **change) for change in changes])
    seen = MachineReport(foreign_cpu_cores=foreign, steal_share=steal)
    monkeypatch.setattr(module, "_measure", lambda settings: (next(found), seen))


def test_the_attempt_in_which_least_was_wrong_counts(monkeypatch) -> None:
    worst, bad = {"lag_p99_ms": 9.0, "itl_error_p99_ms": 9.0}, {"lag_p99_ms": 0.9}
    measured(monkeypatch, bad, worst, {"lag_p99_ms": 5.0})
    got = module.calibrate(SETTINGS, aims(SETTINGS))
    assert [len(each.reasons) for each in got.attempts] == [1, 2, 1] and got.figures.lag_p99_ms == 5.0
    assert len(got.reasons) == 1 and "p99 5.00 ms" in got.reasons[0]


def run_command(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["dev", "calibrate-client", *words])
    return ended.value.code, " ".join("".join(capsys.readouterr()).split())


def test_one_stall_does_not_fail_the_command_and_is_told(tmp_path, monkeypatch, capsys) -> None:
    measured(monkeypatch, {"coalesced_share": 0.00205}, {}, {}, foreign=0.31, steal=0.07)
    path = tmp_path / "c.json"
    code, said = run_command(capsys, "--json", str(path))
    assert code == 0 and "attempt 2 of 2 kept to every limit: the client is good" in said
    assert "attempt 2 of 2: 1000 chunks" in said
    assert (
        "OVER THE LIMIT in attempt 1 of 2 (meanwhile other processes used 0.31 of a core and the host took 7.0%" in said
    )
    told = json.loads(path.read_text())
    assert told["reasons"] == [] and told["figures"]["coalesced_share"] == 0.0
    assert [each["figures"]["coalesced_share"] for each in told["attempts"]] == [0.00205, 0.0]
    assert [len(each["reasons"]) for each in told["attempts"]] == [1, 0]
    assert told["attempts"][0]["foreign_cpu_cores"] == 0.31 and told["attempts"][0]["steal_share"] == 0.07


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json", "no/such/c.json"), "no/such"), (("--json", "."), "directory"), (("--itl-ms", "nan"), "nan"),
        (("--streams", "2", "--processes", "4"), "--processes 4"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_the_measurement(tmp_path, monkeypatch, capsys, words, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    measured(monkeypatch)  # nothing: to measure is an error
    code, told = run_command(capsys, *words)
    assert code == 2 and said in told and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "code"), [({}, 0), ({"lag_p99_ms": 0.9}, 1)])
def test_the_commands_exit_code_and_file(tmp_path, monkeypatch, capsys, change: dict, code: int) -> None:
    measured(monkeypatch, change, change, change)
    words = ("--streams", "64", "--itl-ms", "20", "--json", str(tmp_path / "c.json"))
    ended, said = run_command(capsys, *words)
    assert ended == code and ("OVER THE LIMIT in attempt 3 of 3" in said) == (code == 1)
    assert "timestamp lag p99, early or late (ms)" in said and "25.0" in said and "30.0" in said
    stored = ClientCalibration.from_json(told := json.loads((tmp_path / "c.json").read_text()))
    assert stored.settings.streams == 64 and bool(stored.reasons) == (code == 1)
    assert json.loads(json.dumps(stored.to_json())) == told


def test_a_mock_server_that_does_not_start_is_said_and_none_is_left_behind(tmp_path, monkeypatch) -> None:
    def interrupt(self: MockProcess) -> str:
        raise KeyboardInterrupt

    refused, interrupted = MockProcess(tmp_path, {"no-such-option": 1}), MockProcess(tmp_path, {})
    with pytest.raises(MeasurementError, match="no-such-option"), refused:
        pass
    monkeypatch.setattr(MockProcess, "_ready_url", interrupt)
    with pytest.raises(KeyboardInterrupt), interrupted:
        pass
    assert None not in (refused._process.poll(), interrupted._process.poll())
