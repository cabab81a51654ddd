"""When a load may be believed: timestamp error from the server's stamps, coalescing, CPU, slip."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench.common.records import read_record
from kvbench.load.client_figures import Clocked, busiest_second, client_figures, stamp_errors, turnarounds
from kvbench.load.completion import Completion, judge
from kvbench.load.endpoints import Dialect
from kvbench.load.outcome import DrivenLoad, write_outcome
from kvbench.load.samples import Sample
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import client_reasons, invalid_reasons, nothing_streamed, other_prompts, short_outputs
from kvbench.metrics.model import LoadOutcome
from kvbench.requests.request import RequestList, RequestSpec
from kvbench_engine.boot import BOOT_HEADER, boot_id


def client_report(samples, lags, cpu_s, wall_s, mode, kernel_stamps=False):
    """The figures of a client of one process."""
    return client_figures(samples, lags, [Clocked(cpu_s=cpu_s, reads=int(kernel_stamps))], mode, wall_s)


def sample(sent: list[float], received: list[float], **more) -> Sample:
    request = RequestSpec(0, "chat", (1, 2, 3), None, len(sent), None, 0)
    done = Completion(chunk_times=received, sent_times=sent, **more)
    return Sample(request, 0, 0.0, 0.0, received[-1], done)


def reasons(samples, *, lags=(), cpu_s=0.1, wall_s=10.0, mode="closed") -> str:
    return " ".join(invalid_reasons(client_report(samples, list(lags), cpu_s, wall_s, mode), 0))


def test_error_is_receipt_minus_the_servers_stamp():
    got = stamp_errors([sample([1.0, 1.5], [1.0002, 1.5004]), sample([2.0], [2.001])])
    assert list(got) == pytest.approx([0.0002, 0.0004, 0.001])
    for of_another_clock in (sample([5.0], [4.0]), sample([5.0], [90000.0]), sample([], [4.0])):
        assert stamp_errors([of_another_clock]) is None


def test_a_stamp_that_is_early_or_missing_switches_no_check_off():
    """Chunks 5 ms late and half of them coalesced: one odd stamp does not make the load good."""
    bad = [late(0.005, 50, coalesced=25) for _ in range(20)]
    early = late(0.005, 50, coalesced=25)
    early.completion.chunk_times[0] = early.completion.sent_times[0] - 1e-6
    stampless = sample([0.02 * i for i in range(49)], [0.02 * i for i in range(50)])
    for odd in (early, stampless):
        said = invalid_reasons(client_report([*bad, odd], [0.0001] * 200, 0.1, 1.0, "closed", True), 0)
        assert len(said) == 2 and "timestamps lagged: p99 5.00 ms" in said[0] and "although they were" in said[1]


def late(by: float, count: int = 300, **more) -> Sample:
    sent = [0.02 * i for i in range(count)]
    return sample(sent, [t + by for t in sent], **more)


def test_early_stamps_are_as_wrong_as_late_ones_and_few_chunks_are_not_judged():
    assert "timestamps were early: p99 3.00 ms, the limit is 1.00 ms" in reasons([late(-0.003)])
    assert reasons([late(-0.0003)]) == ""
    few, many = (client_report([late(0.003, count)], [], 0.1, 10.0, "closed") for count in (99, 100))
    assert (few.lag_judged, many.lag_judged) == (False, True)
    assert invalid_reasons(few, 0) == [] and len(invalid_reasons(many, 0)) == 1


def test_a_late_client_is_invalid_and_a_machine_that_stood_still_is_not():
    slow = [0.2 * i for i in range(300)]
    assert reasons([sample(slow, [t + 0.003 for t in slow])]) == ""  # the limit is 2 % of 200 ms
    stalls = [0.0001] * 900 + [0.040] * 100  # the probe saw the whole machine stop
    assert reasons([late(0.0002)], lags=stalls) == ""
    assert "timestamps lagged: p99 3.00 ms, the limit is 1.00 ms" in reasons([late(0.003)], lags=[0.0] * 1000)
    assert "timestamps lagged: p99 40.00 ms" in reasons([sample([], [0.1, 0.2])], lags=stalls), "no stamps: the probe"


def stopped(seconds: float, load_s: float) -> list[float]:
    """What the probe sees of one stop: each tick in it is late to its end."""
    late_ticks = [seconds - 0.01 * k for k in range(round(seconds * 100))]
    return [0.0001] * (round(load_s * 100) - len(late_ticks)) + late_ticks


@pytest.mark.parametrize(
    ("seconds", "load_s", "what"),
    [
        (2.0, 4.0, "stood still for 50.0% of the load and up to 2000 ms"),
        (0.11, 4.9, "stood still for 2.0% of the load and up to 110 ms"),  # 10 of 490 ticks
        (0.11, 5.0, ""),  # 10 of 500
        (0.10, 0.3, ""),  # a hiccup of the machine in a short load
    ],
)
@pytest.mark.parametrize("stamps", ["kernel", "server"])
def test_a_suspended_client_is_invalid_however_few_its_chunks(seconds, load_s, what, stamps):
    chunks = late(0.0002, 8) if stamps == "server" else sample([], [0.02 * i for i in range(8)])
    client = client_report([chunks], stopped(seconds, load_s), 0.1, load_s, "closed", stamps == "kernel")
    found = invalid_reasons(client, 0)
    assert len(found) == bool(what) and what in "".join(found)
    assert client_reasons(LoadOutcome(client=client, invalid_reasons=found)) == found, "it is measured again"


def test_with_the_kernels_stamps_a_late_loop_does_not_make_them_late():
    """Nobody else stamps: then the loop's lateness matters where chunks shared reads, and the server may have sent
    them together."""

    def said(lag: float, coalesced: int) -> str:
        chunks = [sample([], [0.02 * i for i in range(300)], coalesced=coalesced)]
        return " ".join(invalid_reasons(client_report(chunks, [lag] * 1000, 0.1, 10.0, "closed", True), 0))

    figures = client_report([sample([], [0.02, 0.04])], [0.005] * 1000, 0.1, 10.0, "closed", True)
    assert (figures.lag_source, figures.lag_p99_ms, figures.lag_judged) == ("kernel stamps", None, False)
    assert figures.loop_lag_p99_ms == pytest.approx(5.0)
    assert said(0.005, 3) == "" and said(0.0009, 200) == ""
    assert "its loop's lag p99 is 5.00 ms; the limits are 1% and 1.00 ms" in said(0.005, 4)
    assert client_report([late(0.0002)], [0.5], 0.1, 10.0, "closed", True).lag_source == "server stamps"


def test_cpu_slip_and_coalescing_invalidate():
    assert "used 80% of a core" in reasons([late(0.0)], cpu_s=8.0)
    slipped = Sample(late(0.0).request, 0, 0.0, 0.02, 1.0, Completion())
    assert "arrivals slipped: p99 20.00 ms" in reasons([slipped], mode="open")
    assert "1.3% of the chunks were read together with the one before although they were sent apart" in (
        reasons([late(0.0, coalesced=4)])
    )
    assert reasons([late(0.0, coalesced=3)]) == ""
    assert "sent apart" in reasons([late(0.0, 100, coalesced=2)])
    assert reasons([late(0.0, 99, coalesced=50)]) == "", "too few chunks to judge"


def stream(sent: list[float], boot: str | None) -> bytes:
    """A whole response, one event a stamp, then usage and [DONE]. ``boot``: of the machine that stamps."""
    events = [
        {"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}], "kvbench": {"sent": t}} for t in sent
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(sent)}})
    body = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    told = b"" if boot is None else f"{BOOT_HEADER}: {boot}\r\n".encode()
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n" % (told, len(body)) + body


@pytest.mark.parametrize(
    ("sent", "boot", "coalesced"),
    [
        ([1.0, 1.02, 1.04], boot_id(), 2), ([1.0, 1.0001, 1.0002], boot_id(), 0),
        ([1.0, 1.02], None, 1), ([1.0, 1.02], "of-another-machine", 1),  # booted later: stamps of another clock
    ],
)  # fmt: skip
def test_chunks_in_one_read_count_only_if_the_server_sent_them_apart(sent, boot, coalesced):
    outcome = judge([8.05], [stream(sent, boot)], max_tokens=3)
    assert outcome.ok and outcome.coalesced == coalesced, outcome.error
    assert outcome.sent_times == (sent if boot == boot_id() else [])


def arrival(t0: float, ts: float, queued_s: float = 0.0) -> Sample:
    return Sample(RequestSpec(0, "a", (1,), None, 1, t0), 0, t0, ts, ts + 1.0, Completion(), queued_s)


@pytest.mark.parametrize(("lengths", "obeyed", "short", "said"), [
    ([10] * 200, True, 0, ""),
    ([10] * 198 + [3, 9], True, 2, ""),
    ([10] * 197 + [3] * 3, True, 3, "3 of 200 outputs"),
    ([3] * 200, False, 0, ""),
])  # fmt: skip
def test_outputs_shorter_than_ignore_eos_asked_for_are_counted(lengths, obeyed, short, said):
    request = RequestSpec(0, "chat", (1, 2, 3), None, 10, None, 0)
    samples = [Sample(request, 0, 0.0, 0.0, 1.0, Completion(output_tokens=n)) for n in lengths]
    samples += [Sample(request, 0, 0.0, 0.0, 1.0, Completion(error_kind="truncated", output_tokens=1))] * 50
    count, why = short_outputs(samples, obeyed)
    assert count == short and "".join(why).startswith(said) and bool(why) == bool(said)


def test_each_sequence_of_a_request_has_its_length_and_its_gaps():
    request = RequestSpec(0, "chat", (1, 2, 3), None, 10, n=3)
    samples = [Sample(request, 0, 0.0, 0.0, 1.0, Completion(output_tokens=n)) for n in (30, 30, 29, 10)]
    assert short_outputs(samples, True)[0] == 2
    request = RequestSpec(0, "chat", (1, 2, 3), None, 2, n=2)
    done = Completion(chunk_times=[1.0, 1.001, 2.0, 2.001], chunk_choices=[0, 1, 0, 1], output_tokens=4)
    report = client_report([Sample(request, 0, 0.0, 0.0, 2.1, done)], [], 0.1, 1.0, "closed")
    assert report.itl_p50_ms == pytest.approx(1000)


def prompts(*told: int | None, text: str | None = None, new_tokens: int = 0, ok: bool = True) -> list[Sample]:
    """Prompts of 50 tokens, of which the server says that they have ``told``."""
    request = RequestSpec(0, "c", tuple(range(50)), text, 2, new_tokens=new_tokens)
    kind = None if ok else "truncated"
    return [Sample(request, 0, 0.0, 0.0, 1.0, Completion(error_kind=kind, done=ok, prompt_tokens=n)) for n in told]


def test_a_load_of_which_nothing_was_streamed_shows_no_times() -> None:
    hidden = prompts(50, 50)
    (reason,) = nothing_streamed(hidden)
    assert "none of 2 answers" in reason
    seen = [replace(hidden[0], completion=Completion(done=True, chunk_times=[1.0]))]
    assert nothing_streamed(hidden + seen) == nothing_streamed(prompts(50, ok=False)) == []


def test_a_server_that_reads_other_prompts_than_were_sent_is_invalid() -> None:
    own = [51] * 150 + [46, 54]  # its own tokens around each
    assert other_prompts(prompts(*own), Dialect()) == []
    assert other_prompts(prompts(*[50] * 99, 40), Dialect()) == []
    (said,) = other_prompts(prompts(*[50] * 98, 40, 0), Dialect())
    assert "counted 2 of 100 prompts otherwise than they were sent, by up to 50 tokens, the limit is 1%" in said
    for unknown in (prompts(0, text="a text"), prompts(9, new_tokens=5), prompts(None), prompts(0, ok=False)):
        assert other_prompts(unknown, Dialect()) == []
    assert other_prompts(prompts(0), Dialect(usage=False)) == []
    cut, template = prompts(*[58] * 98, 40, 9, text="a text"), prompts(*[58] * 200, text="a text")
    assert other_prompts(cut, Dialect()) == other_prompts(template, Dialect(), exact_texts=True) == []
    (said,) = other_prompts(cut, Dialect(), exact_texts=True)
    assert "counted 2 of 100 prompts" in said and "by up to 49 tokens" in said
    assert client_report(prompts(50, 51, 0), [], 0.1, 1.0, "closed").prompt_token_mismatches == 2


def test_what_the_server_did_otherwise_stands_in_load_json(tmp_path) -> None:
    request = RequestSpec(0, "c", tuple(range(50)), None, 10)
    samples = [Sample(request, 0, 0.0, 0.0, 1.0, Completion(prompt_tokens=40, output_tokens=3, done=True))] * 2
    spec = LoadSpec(
        base_url="http://h", model="m", mode="closed", concurrency=1, requests_file="", out_dir=str(tmp_path),
        timeout_s=1.0, ignore_eos=True,
    )  # fmt: skip
    client = client_report(samples, [], 0.1, 1.0, "closed")
    written = write_outcome(spec, RequestList([request] * 2), DrivenLoad(samples, 0.0, Clocked(), client))
    outcome = read_record(LoadOutcome, tmp_path / "load.json", "run it again")
    assert outcome == written
    said = " ".join(outcome.invalid_reasons)
    assert "2 of 2 outputs" in said and "counted 2 of 2 prompts otherwise" in said


def test_the_clients_own_reasons_are_told_from_the_servers(tmp_path) -> None:
    client = client_report([late(0.003)], [0.0] * 1000, 0.1, 10.0, "closed")
    own, cut = invalid_reasons(client, 0), "2 of 2 outputs were shorter"
    outcome = {"client": client.to_json() | {"processes": [{"name": "worker 1"}]}}
    outcome |= {"invalid_reasons": [*own, "worker 1: it lagged", cut, *invalid_reasons(client, 3)]}
    outcome = LoadOutcome.parse(outcome)
    assert len(own) == 1 and client_reasons(outcome) == [*own, "worker 1: it lagged", *own]
    assert client_reasons(LoadOutcome(invalid_reasons=[cut])) == []


def test_requests_due_at_once_leave_one_after_the_other_and_that_is_no_slip():
    burst = [arrival(0.0, 40e-6 * i) for i in range(400)]  # the last one leaves after 16 ms
    assert reasons(burst, mode="open") == ""
    slow = [arrival(0.0, 80e-6 * i) for i in range(400)]
    assert "arrivals slipped: p99 11.8" in reasons(slow, mode="open")  # 30 us more than allowed for each of 396
    spaced = [arrival(0.01 * i, 0.01 * i + 0.006) for i in range(400)]
    assert "arrivals slipped: p99 6.00 ms beyond 50 us" in reasons(spaced, mode="open")
    dense = [arrival(1e-5 * i, 1e-5 * i + 0.006) for i in range(1000)]  # one after the other, but not at one moment
    assert "arrivals slipped: p99 6.00 ms" in reasons(dense, mode="open")
    assert reasons(spaced, mode="closed") == ""


def test_a_wait_for_a_place_is_no_slip():
    assert reasons([arrival(0.0, 0.5 * i, 0.5 * i) for i in range(20)], mode="open") == ""
    assert "arrivals slipped" in reasons([arrival(0.0, 0.5 * i + 0.007, 0.5 * i) for i in range(20)], mode="open")
    broken = Sample(RequestSpec(1, "a", (1,), None, 1), 0, 9.0, 9.0, 9.0, Completion(error_kind="session_broken"))
    late_ones = [arrival(float(i), i + 0.02) for i in range(2)]
    assert "arrivals slipped" in reasons([*late_ones, *[broken] * 400], mode="open"), "never sent, so never on time"


def visit(user: int, ts: float, end: float, **of_request: object) -> Sample:
    request = RequestSpec(0, "chat", (1,), None, 2, **of_request)
    return Sample(request, user, ts, ts, end, Completion(chunk_times=[ts, end], output_tokens=2))


def test_turnarounds_are_each_users_own_and_think_times_are_none() -> None:
    """User 0: 4 ms, then a turn that is due after 2 s and sent 6 ms late; user 1: 8 ms and, for ten of it, nothing."""
    rows = [
        visit(1, 0.0, 5.0), visit(0, 0.0, 1.0), visit(1, 5.008, 6.0),
        visit(0, 1.004, 2.0, session=3), visit(0, 4.006, 5.0, session=3, turn=1, think_s=2.0),
        Sample(RequestSpec(0, "c", (1,), None, 1), 1, 9.0, 9.0, 9.0, Completion(error_kind="session_broken")),
    ]  # fmt: skip
    gaps, share = turnarounds(rows)
    assert sorted(gaps) == pytest.approx([0.004, 0.006, 0.008])
    assert share == pytest.approx(0.018 / (5.0 + 6.0))
    assert turnarounds(rows[:2]) == ([], None) and turnarounds([]) == ([], None)


def loop_of(turnaround_s: float, count: int = 50, busy_s: float = 0.06) -> list[Sample]:
    """Two users, each with ``count`` requests of ``busy_s``."""
    starts = [k * (busy_s + turnaround_s) for k in range(count)]
    return [visit(user, t, t + busy_s) for user in (0, 1) for t in starts]


def test_a_closed_loop_that_loses_throughput_between_its_requests_is_invalid() -> None:
    good, bad = loop_of(0.0012), loop_of(0.0013)  # of 60 ms: 1.96 and 2.1 %
    assert reasons(good) == "" == reasons(bad, mode="open")
    assert "spent 2.1% of their time between a stream's end and the next send (median 1.30 ms, p99 1.30 ms)" in (
        reasons(bad)
    )
    figures = client_report(bad, [], 0.1, 10.0, "closed")
    sent_for = max(s.end for s in bad)
    assert figures.turnaround_share == pytest.approx(1 - 0.06 * 100 / (2 * sent_for))  # of two users
    few = loop_of(0.02, count=5)
    assert reasons(few) == "", "8 turnarounds: one stall of the machine would decide"
    assert client_report(few, [], 0.1, 10.0, "closed").turnarounds == 8
    assert reasons(loop_of(0.02, count=6)) != ""


def test_the_busiest_second_is_that_of_a_short_storm() -> None:
    quiet = [sample([], [0.3 + 2 * k]) for k in range(50)]
    storm = sample([], [61.4 + k / 5000 for k in range(2500)])
    assert busiest_second([*quiet, storm]) == pytest.approx(2500, abs=1)
    assert busiest_second([]) == 0
    assert client_report([storm], [], 0.1, 100.0, "open").chunks_of_busiest_second == 2500


def test_reads_without_the_kernels_stamp_are_counted() -> None:
    assert Clocked(reads=1000, unstamped_reads=10).kernel_stamps
    assert not Clocked(reads=1000, unstamped_reads=11).kernel_stamps and not Clocked().kernel_stamps
