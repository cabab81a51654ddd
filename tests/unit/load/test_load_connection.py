"""When bytes came: the kernel's stamp of their arrival, whatever the reader and the wall clock do meanwhile."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

import gevent
import pytest

from kvbench.load import client as module
from kvbench.load.client import Address, Connection, StreamFailure, Timeouts, open_connection

stamped = pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what arrives")
LATE_S = 0.05


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection of ours and the server's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Connection(socket.create_connection(listener.getsockname()))
        theirs, _ = listener.accept()
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with theirs:
            assert ours.receive() == (None, 0.0)  # nothing yet, and no waiting for it
            for _ in range(50):  # the first socket of a system that asks for stamps gets them a moment later
                before = ours.unstamped
                theirs.sendall(b".")
                time.sleep(0.005)
                assert ours.receive()[0] == b"."
                if ours.unstamped == before:
                    break
            ours.unstamped = 0
            yield ours, theirs
        ours.close()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    with connected() as both:
        yield both


def sent_and_read_late(pair: tuple[Connection, socket.socket], between=lambda: None) -> tuple[float, float, float]:
    """(before the send, the stamp, before the read), of a byte that lay there for LATE_S."""
    ours, theirs = pair
    before = time.perf_counter()
    theirs.sendall(b"x")
    time.sleep(LATE_S)
    between()
    reading = time.perf_counter()
    data, arrived = ours.receive()
    assert data == b"x"
    return before, arrived, reading


@stamped
def test_a_late_reader_still_knows_when_the_bytes_came(pair) -> None:
    for attempt in range(20):  # a machine that stands still between the reads of two clocks costs a stamp
        before, arrived, reading = sent_and_read_late(pair)
        if pair[0].unstamped == attempt:
            break
    assert before <= arrived + 1e-6
    assert arrived < reading - LATE_S / 2  # a stamp of the read would be later than this


def test_without_the_kernels_stamp_the_moment_of_the_read_counts(pair) -> None:
    ours, _ = pair
    receive = ours._recvmsg
    ours._recvmsg = lambda *sizes: (receive(*sizes)[0], [], 0, None)
    _, arrived, reading = sent_and_read_late(pair)
    assert reading <= arrived <= time.perf_counter()
    assert ours.unstamped == 1


@stamped
def test_the_wall_clock_is_set_while_bytes_lie_on_several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is read first: no packet is stamped before it was sent, and those read later are not taken for new."""
    wall = time.time
    with connected() as first, connected() as second:
        before = time.perf_counter()
        for _, theirs in (first, second):
            theirs.sendall(b"x")
        time.sleep(0.05)
        monkeypatch.setattr(module.time, "time", lambda: wall() + 10.0)
        for ours, _ in (first, second):
            data, arrived = ours.receive()
            assert data == b"x" and before + 0.05 <= arrived <= time.perf_counter()
            assert ours.unstamped == 1


@stamped
def test_a_process_that_stood_still_between_two_clocks_keeps_its_stamp(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted after it read the wall clock: the clocks are read once more, and the stamp is the kernel's."""
    ours, theirs = pair
    wall, calls = time.time, []

    def preempted() -> float:
        now = wall()
        if not calls:
            time.sleep(0.03)
        calls.append(now)
        return now

    theirs.sendall(b"x")
    time.sleep(0.01)
    reading = time.perf_counter()
    monkeypatch.setattr(module.time, "time", preempted)
    _, arrived = ours.receive()
    assert len(calls) == 2 and arrived < reading and ours.unstamped == 0


@pytest.mark.parametrize("step_s", [7200.0, -7200.0, 0.5])
def test_a_step_of_the_wall_clock_spoils_no_stamp(pair, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """The stamp is of the old wall clock, and now is of the new one: their difference says nothing."""
    ours, theirs = pair
    wall = time.time
    before, arrived, reading = sent_and_read_late(
        pair, lambda: monkeypatch.setattr(module.time, "time", lambda: wall() + step_s)
    )
    assert before <= arrived <= time.perf_counter()
    assert arrived >= reading
    theirs.sendall(b"y")
    time.sleep(0.01)
    monkeypatch.undo()
    assert before < ours.receive()[1] <= time.perf_counter()


@stamped
def test_bytes_did_not_come_before_the_socket_was_last_found_empty(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that runs ahead by less than a step: stamps stay in order."""
    ours, theirs = pair
    _, first, _ = sent_and_read_late(pair)
    emptied = ours._read_at
    theirs.sendall(b"y")
    wall = time.time
    monkeypatch.setattr(module.time, "time", lambda: wall() + 0.0009)
    _, second = ours.receive()
    assert first < emptied <= second <= ours._read_at


def test_addresses() -> None:
    for url, address in (
        ("http://h", Address("h", 80, "")),
        ("https://h/v1/", Address("h", 443, "/v1", True)),
        ("https://[::1]:8443", Address("::1", 8443, "", True)),
    ):
        assert Address.from_url(url) == address
        assert address.authority.startswith("[::1]:" if ":" in address.host else "h:")
    for url in ("ftp://h", "h:80", "http://", "http://h:99999", "http://h:port"):
        with pytest.raises(ValueError, match=r"the URL '.*' (is neither|names no host|has an impossible port)"):
            Address.from_url(url)


def unknown(*arguments: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("connect", "kind", "told"),
    [(unknown, "connection", "name:80"), (lambda *_: gevent.sleep(300), "connect_timeout", "0.1 s")],
)
def test_looking_up_the_name_is_part_of_connecting(monkeypatch: pytest.MonkeyPatch, connect, kind: str, told: str):
    monkeypatch.setattr(module.socket, "create_connection", connect)
    with pytest.raises(StreamFailure) as failed:
        open_connection(Address("name", 80, ""), Timeouts(connect=0.1), None)
    assert failed.value.kind == kind and told in str(failed.value)
