"""CPU time that other processes used while a load ran, and that a virtual machine's host took.

All CPU time of the machine (/proc/stat, Linux only) minus that of the server with its children, of the load client
and of kvbench itself is foreign. A load that others disturbed measures them as well, so it is no measurement of the
configuration.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from kvbench.common.machine import gpu_energy_j, usable_cores
from kvbench.common.records import Record
from kvbench.common.text import plural

MAX_FOREIGN_SHARE = 0.05  # of all cores that kvbench and the server may use
MIN_FOREIGN_CORES = 0.10  # allowed however few cores there are
MAX_STEAL_SHARE = 0.05
_RESOLUTION_S = 0.10  # the kernel counts in ticks of 10 ms, on every core and for every process
_LONG_ENOUGH_S = 2.0  # from here on the ticks are well below the limit
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; guest time is within user
_STEAL = 7
_PROC_STAT = Path("/proc/stat")
_INTERPRETER = re.compile(r"python[\d.]*|node|ruby|perl|bash|sh")  # named with the script that it runs
_WORTH_NAMING = 0.02  # cores
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")


@dataclass(frozen=True)
class ServerProcess:
    """The server's place. ``pid`` None with ``local``: it is on this machine, but which process is not known.

    ``forked``: from a process that had imported it, whose memory layout it has.
    """

    pid: int | None
    local: bool = True
    forked: bool = False


_NO_SERVER = ServerProcess(None, local=False)


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds since some beginning; ``wall`` [s] is time.monotonic(). None: cannot be known."""

    wall: float
    busy_s: float
    steal_s: float
    cores: int
    own_s: float
    client_s: float | None
    server_s: float | None


def read_cpu(server: ServerProcess, client_pid: int | None, stat: Path = _PROC_STAT) -> CpuReading | None:
    """One reading, about 2 ms; None where there is no /proc/stat (not Linux).

    Only the cores that kvbench and the server may use are counted: what runs on others is no competition for them.
    """
    try:
        text = stat.read_text()
    except OSError:
        return None
    wall = time.monotonic()
    busy, steal, cores = parse_stat(text, _cores_of(server))
    return CpuReading(
        wall=wall,
        busy_s=busy,
        steal_s=steal,
        cores=cores,
        own_s=time.process_time(),
        client_s=None if client_pid is None else tree_cpu_s(client_pid),
        server_s=None if server.pid is None else tree_cpu_s(server.pid),
    )


def parse_stat(text: str, cores: set[int] | None) -> tuple[float, float, int]:
    """Reads (busy seconds, stolen seconds, number of cores) from /proc/stat's text; ``cores`` None: all of them."""
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    busy = steal = 0.0
    count = 0
    for line in text.splitlines():
        name, *values = line.split()
        if not (name.startswith("cpu") and name[3:].isdigit()) or (cores is not None and int(name[3:]) not in cores):
            continue
        times = [int(v) for v in values]
        busy += sum(times[i] for i in _BUSY) * tick
        steal += times[_STEAL] * tick if len(times) > _STEAL else 0.0
        count += 1
    return busy, steal, count


def _cores_of(server: ServerProcess) -> set[int] | None:
    try:
        if server.pid is None:
            return None if server.local else set(psutil.Process().cpu_affinity())
        return {*psutil.Process().cpu_affinity(), *psutil.Process(server.pid).cpu_affinity()}
    except (psutil.Error, AttributeError):
        return None


def tree_cpu_s(pid: int) -> float | None:
    """CPU seconds of a process and its descendants, ended ones included; None when it is gone.

    Threads that ended are in their process's time, children that ended and were waited for in their parent's.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        total = sum(root.cpu_times()[:4])
    except psutil.Error:
        return None
    for process in processes[1:]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it ended just now: from here on it is in its parent's time
    return total


class MachineReport(Record):
    """The machine's use during a load [cores, share, s]; None where the system does not tell.

    ``gpu_energy_j``: of all GPUs of this machine, by NVML.
    """

    foreign_cpu_cores: float | None = None
    steal_share: float | None = None
    load_average: float | None = None
    cores: int | None = None
    server_cpu_cores: float | None = None
    client_cpu_cores: float | None = None
    seconds: float | None = None
    gpu_energy_j: float | None = None


def machine_report(
    start: CpuReading | None, end: CpuReading | None, server: ServerProcess, gpu_energy: float | None = None
) -> MachineReport:
    """Computes what happened between two readings."""
    load = os.getloadavg()[0]
    if start is None or end is None or end.wall <= start.wall or not end.cores:
        return MachineReport(load_average=load, cores=os.cpu_count(), gpu_energy_j=gpu_energy)
    wall = end.wall - start.wall
    client, served = _rate(start.client_s, end.client_s, wall), _rate(start.server_s, end.server_s, wall)
    foreign = None
    if client is not None and (served is not None or not server.local):
        ours = client + (served or 0.0) + (end.own_s - start.own_s) / wall
        foreign = max(0.0, (end.busy_s - start.busy_s) / wall - ours)
    return MachineReport(
        foreign_cpu_cores=foreign,
        steal_share=(end.steal_s - start.steal_s) / (wall * end.cores),
        load_average=load,
        cores=end.cores,
        server_cpu_cores=served,
        client_cpu_cores=client,
        seconds=wall,
        gpu_energy_j=gpu_energy,
    )


def _rate(start: float | None, end: float | None, wall: float) -> float | None:
    return None if start is None or end is None else max(0.0, end - start) / wall


class ForeignWatch:
    """CPU time of others than this process and its children, ended ones included, from here to ``report``."""

    def __init__(self, stat: Path = _PROC_STAT) -> None:
        self._stat = stat
        self._start = self._read()

    def _read(self) -> CpuReading | None:
        """A reading in which this process with its children is the client."""
        reading = read_cpu(_NO_SERVER, os.getpid(), self._stat)
        return reading and dataclasses.replace(reading, own_s=0.0)

    def report(self) -> dict[str, Any]:
        """Returns the cores that others used on average (``foreign_cpu_cores``), and whether too many (``disturbed``).

        Empty where the system does not tell.
        """
        machine = machine_report(self._start, self._read(), _NO_SERVER)
        foreign, cores, seconds = machine.foreign_cpu_cores, machine.cores, machine.seconds
        if foreign is None or cores is None or seconds is None:
            return {}
        return {"foreign_cpu_cores": round(foreign, 3), "disturbed": foreign > foreign_limit(cores, seconds)}


def waits_for_quiet(limit_s: float, check: Callable[[], None], on_busy: Callable[[str], None]) -> bool:
    """Waits until others leave this machine to us for 2 s; False if they do not within ``limit_s``.

    For a caller that runs neither server nor load client meanwhile. ``check``: called twice a second, may raise.
    ``on_busy``: told after every 2 s which programs use the processor.
    """
    until = time.monotonic() + limit_s
    while True:
        watch, others, begun = ForeignWatch(), _cpu_of_others(), time.monotonic()
        while time.monotonic() < begun + _LONG_ENOUGH_S:
            time.sleep(_LONG_ENOUGH_S / 4)
            check()
        report = watch.report()
        if not report or not report["disturbed"]:
            return True
        on_busy(_busiest(others, _cpu_of_others(), time.monotonic() - begun, report["foreign_cpu_cores"]))
        if time.monotonic() > until:
            return False


def _cpu_of_others() -> dict[tuple[int, float], tuple[str, float]]:
    """Name and CPU seconds of every process but this one and its children, by pid and start."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    used = {}
    for process in psutil.process_iter(["name", "cmdline", "cpu_times", "create_time"]):
        facts = process.info
        if process.pid not in ours and facts["cpu_times"] is not None:
            name = _program(facts["name"] or "?", facts["cmdline"] or ())
            used[process.pid, facts["create_time"]] = (name, sum(facts["cpu_times"][:2]))
    return used


def _program(name: str, command: Sequence[str]) -> str:
    """A process's name, of an interpreter with its script; no other argument, since those may hold secrets."""
    if not _INTERPRETER.fullmatch(name) or len(command) < 2:
        return name
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    is_file = "-c" not in command and script and not re.search(r"\s", script)
    return f"{name} {Path(script).name[:30]}" if is_file else name


def _busiest(
    before: Mapping[Any, tuple[str, float]], after: Mapping[Any, tuple[str, float]], wall: float, foreign: float
) -> str:
    """Names the three programs that used most CPU over ``wall`` [s]: `0.52 of a core: firefox 0.31, train.py 0.20`.

    ``foreign``: cores in all; processes that ended meanwhile are in it, and have no name.
    """
    used: Counter[str] = Counter()
    for key, (name, seconds) in after.items():
        used[name] += max(0.0, seconds - before.get(key, (name, 0.0))[1]) / wall
    named = [f"{name} {cores:.2f}" for name, cores in used.most_common(3) if cores >= _WORTH_NAMING]
    cores = f"{foreign:.2f} {'of a core' if foreign <= 1 else 'cores'}"
    return cores + (f": {', '.join(named)}" if named else "")


class MachineWatch:
    """Reads the CPU times when a load's first request is due and when its last one has ended."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._phases: dict[str, tuple[CpuReading | None, float | None]] = {}  # and joules of the GPUs

    def on_phase(self, phase: str, client_pid: int) -> None:
        """Reads the machine at ``begin`` or ``measured``, phases as the load client says them."""
        self._phases[phase] = read_cpu(self.server, client_pid), gpu_energy_j() if self.server.local else None

    def report(self) -> MachineReport:
        """Returns what happened between the two phases."""
        (start, before), (end, after) = (self._phases.get(name, (None, None)) for name in ("begin", "measured"))
        energy = None if before is None or after is None else after - before
        return machine_report(start, end, self.server, energy)


def foreign_limit(cores: int, wall_s: float | None = None) -> float:
    """The CPU [cores] that others may use over ``wall_s`` [s]; short times are given the ticks' resolution on top."""
    ticks = _RESOLUTION_S / wall_s if wall_s and wall_s < _LONG_ENOUGH_S else 0.0
    return max(MIN_FOREIGN_CORES, MAX_FOREIGN_SHARE * cores) + ticks


def limit_words(cores: int, wall_s: float | None = None) -> str:
    """Words the limit on other programs' CPU: "5 % of 16 cores", or the minimum where that would be lower."""
    if (ticks := foreign_limit(cores, wall_s) - foreign_limit(cores)) > 0:
        return f"{limit_words(cores)}, and {ticks:.2f} since {wall_s:.1f} s are too short to tell"
    share = f"{MAX_FOREIGN_SHARE:.0%} of {plural(cores, 'core')}"
    return share if MAX_FOREIGN_SHARE * cores >= MIN_FOREIGN_CORES else f"the minimum; {share} would be less"


def contention_reasons(machine: MachineReport) -> list[str]:
    """Says why the machine makes a load invalid; what is not known invalidates nothing."""
    reasons = []
    foreign, steal, cores, wall = machine.foreign_cpu_cores, machine.steal_share, machine.cores or 1, machine.seconds
    if foreign is not None and foreign > (limit := foreign_limit(cores, wall)):
        reasons.append(
            f"other processes used {foreign:.2f} of a core while this load ran, the limit is {limit:.2f} "
            f"({limit_words(cores, wall)}); stop them and measure again"
        )
    if steal is not None and steal > MAX_STEAL_SHARE:
        reasons.append(
            f"the host took {steal:.1%} of the CPU time away (steal) while this load ran, the limit is "
            f"{MAX_STEAL_SHARE:.0%}; use a machine whose cores are not shared and measure again"
        )
    return reasons


def busy_notice() -> str | None:
    """One line for the start of a sweep when the machine seems to be busy already, else None."""
    average, cores, ours = os.getloadavg()[0], os.cpu_count() or 1, usable_cores()
    if average <= cores / 2:
        return None
    return (
        f"the machine is busy: its load average over the last minute is {average:.1f} on {cores} cores. Loads during "
        f"which other processes use more than {foreign_limit(ours):.2f} of a core ({limit_words(ours)}) are invalid; "
        "a sweep measures them again later, up to twice"
    )


def server_at(base_url: str) -> ServerProcess:
    """The server that listens at a URL, for one that kvbench did not launch."""
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if host not in _LOOPBACK and not _is_own_address(host):
        return ServerProcess(None, local=False)
    try:
        sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return ServerProcess(None)
    return ServerProcess(_topmost({c.pid for c in sockets if c.laddr.port == port and c.pid is not None}))


def _topmost(pids: set[int]) -> int | None:
    """Finds the one of several listeners (workers share a socket) that is no child of another; None without one."""
    top = []
    for pid in pids:
        try:
            parents = {p.pid for p in psutil.Process(pid).parents()}
        except psutil.Error:
            return None
        if not parents & pids:
            top.append(pid)
    return top[0] if len(top) == 1 else None


def _is_own_address(host: str) -> bool:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address for interface in psutil.net_if_addrs().values() for address in interface}
    return bool(addresses & own)
