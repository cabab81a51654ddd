"""One load over HTTP, with a client process and a server of which only the answers are there."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvbench.common.errors import MeasurementError
from kvbench.load.validity import UNKNOWN_STREAMS
from kvbench.measure import http
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job
from kvbench.measure.server import MeasuredServer
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.folder import RunFolder
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.load_section import LoadConfig, load_point
from tests.support.request_rows import frame, row

PROMPTS = {"kind": "synthetic", "classes": [{"name": "any", "share": 1, "prompt_tokens": 8, "output_tokens": 3}]}
UNREAD = "/metrics did not answer while the load ran"


class Answering(Target):
    """A server whose /metrics do not answer while ``silent``; ``read``, ``refused``: how often they were asked."""

    starts_cold = True
    silent = False
    read = refused = 0
    model = ModelFacts("m", 100, 256)

    def metrics(self):
        if self.silent:
            self.refused += 1
            raise MeasurementError("/metrics did not answer")
        self.read += 1
        return MetricsSample(self.at, {"num_requests_running": 0.0, "num_requests_waiting": 0.0}, {})

    def reset_prefix_cache(self):
        return True


def wait_for(condition):
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def send(tmp_path, monkeypatch):
    """Sends a load of one request; its result. ``silent``: never, at first or always, while it runs."""
    log = tmp_path / "log"
    log.write_text("of the start\n")

    def run(silent="never", calibrate=None, strict=True, **load):
        target = Answering("http://127.0.0.1:1")
        target.at = 1.5 if silent == "at first" else 0.0  # in the load, whose request is sent at 1.0
        given = {"mode": "closed", "concurrency": [1], "num_requests": [1], "prompts": PROMPTS, **load}
        config = LoadConfig.model_validate({key: value for key, value in given.items() if value is not None})
        is_open = config.mode == "open"
        users, rate = (None, 5.0) if is_open else (config.concurrency[0], None)
        point = load_point(config.mode, concurrency=users, rate=rate, num_requests=1)

        def drive(spec, *, on_phase, **_):
            if silent != "never":
                target.silent = True
                wait_for(lambda: target.refused)
            if silent == "at first":
                target.silent, before = False, target.read
                wait_for(lambda: target.read > before)
            with log.open("a") as more:
                more.write("of the load\n")
            frame(row(http_status=200, cached_tokens=0)).to_parquet(tmp_path / "out" / "requests.parquet")
            told = {"mode": config.mode, "concurrency": users, "zero_perf_counter": 0.0, "max_in_flight": 1}
            (tmp_path / "out" / "load.json").write_text(json.dumps(told))
            target.silent = False

        monkeypatch.setattr(http.launch, "drive", drive)
        job = Job(
            SimpleNamespace(load=config, seed=0), RunFolder(tmp_path), calibrate=calibrate, poll_s=0.001,
            failures_invalidate=strict,
        )  # fmt: skip
        instrument = HttpInstrument(job)
        info = ServerInfo.read({"engine": {}})
        instrument.server = MeasuredServer(config, 0, target, {}, info, log, lambda: None)
        (tmp_path / "out").mkdir(exist_ok=True)
        requests = RequestList([RequestSpec(0, "any", (1,) * 10, None, 3)])
        return instrument.send(point, requests, tmp_path / "requests.jsonl", tmp_path / "out")

    return run


@pytest.mark.parametrize(
    ("silent", "strict", "told"),
    [("always", True, True), ("always", False, False), ("at first", True, False), ("never", True, False)],
)
def test_metrics_that_do_not_answer_invalidate_a_load_unless_failures_are_a_result(send, silent, strict, told):
    result = send(silent, strict=strict)
    assert any(UNREAD in reason for reason in result.invalid_reasons) == told
    assert result.valid != told


def test_a_load_keeps_the_lines_of_the_servers_log_that_were_written_while_it_ran(send, tmp_path):
    for _ in range(2):
        send()
        assert (tmp_path / "out" / "server.log").read_text() == "of the load\n"


@pytest.mark.parametrize(
    ("load", "streams"),
    [
        ({"concurrency": [4], "num_requests": [4]}, 4),
        ({"mode": "open", "concurrency": None, "request_rate": [5.0], "max_concurrency": 7}, 7),
        ({"mode": "open", "concurrency": None, "request_rate": [5.0]}, UNKNOWN_STREAMS),
    ],
)
def test_the_client_is_calibrated_for_as_many_streams_as_the_load_may_have(send, load, streams):
    calibrate = Mock(return_value=None)
    send(calibrate=calibrate, **load)
    (expected, before), *_ = (call.args for call in calibrate.call_args_list)
    assert expected.streams == streams and before is None
