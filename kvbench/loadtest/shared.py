"""``kvbench load`` over several processes or machines: its options, and what they tell the load process."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvbench.common.errors import UsageError
from kvbench.load.spec import ARRIVE_S, DEFAULT_PORT

if TYPE_CHECKING:
    from kvbench.calibration.cache import ClientLoad
    from kvbench.calibration.calibrate import Calibration

Calibrate = Callable[["ClientLoad", "Calibration | None"], "Calibration | None"]

SHARING_OPTIONS = (
    click.option("--processes", type=click.IntRange(1, 1000), metavar="N",
                 help="Share the load among N processes of this machine (default: the workload's load.processes)."),
    click.option("--master", is_flag=True, help="Share the load among workers on other machines, and wait for them."),
    click.option("--expect-workers", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N",
                 help="--master: how many."),
    click.option("--bind-host", default="127.0.0.1", show_default=True, metavar="HOST",
                 help="--master: where to listen for them, e.g. 0.0.0.0 on a network of your own."),
    click.option("--bind-port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True, metavar="PORT",
                 help="--master: and at which port."),
    click.option("--worker", is_flag=True, help="Be a worker of the master at --master-host; nothing else is needed."),
    click.option("--master-host", default="127.0.0.1", show_default=True, metavar="HOST", help="--worker: the master."),
    click.option("--master-port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True,
                 metavar="PORT", help="--worker: its port."),
)  # fmt: skip


@dataclass(frozen=True)
class Sharing:
    """``client``: fields of LoadSpec; ``arguments``: of the load process; ``notice``: what the user is told first.

    ``streams_here``: whether this machine sends requests, not only workers on others: so many ``workers``.
    """

    client: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    notice: str | None = None
    streams_here: bool = True
    workers: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For a manifest: processes of this machine (None: as the workload says), or workers of others."""
        return {"processes": self.client.get("processes"), "workers": self.workers}

    def calibrate(self, demand: ClientLoad, before: Calibration | None, calibrator: Calibrate) -> Calibration | None:
        """Calibrates this machine, where streams are to run on it; workers on other machines see to themselves."""
        return calibrator(demand, before) if self.streams_here else None


def sharing(options: Mapping[str, Any]) -> Sharing:
    """What the command line says of it; its words have been checked (``load_conflicts.check_words``)."""
    if not options["master"]:
        return Sharing({"processes": options["processes"]} if options["processes"] else {})
    host, port, count = options["bind_host"], options["bind_port"], options["expect_workers"]
    words = (
        "--master",
        "--expect-workers",
        count,
        "--bind-host",
        host,
        "--bind-port",
        port,
        "--arrive-timeout",
        ARRIVE_S,
    )
    notice = (
        f"waiting up to {ARRIVE_S:g} s for {count} worker{'s' if count > 1 else ''} at {host}:{port}; on each machine: "
        f"kvbench load --worker --master-host {'HOST' if host in ('0.0.0.0', '::', '*') else host} --master-port {port}"
    )
    client = {"calibrate_workers": not options["no_calibration"]}
    return Sharing(client, tuple(str(word) for word in words), notice, streams_here=False, workers=count)


def require_free(host: str, port: int) -> None:
    """Raises UsageError where a master cannot listen: known before anything is sent, or waited for."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        place = error.errno in (errno.EADDRINUSE, errno.EACCES)
        what = f"--bind-port {port} cannot be used at {host}" if place else f"--bind-host {host} cannot be used"
        next_step = "give a free --bind-port" if place else "give an address of this machine"
        raise UsageError(f"{what} ({error.strerror}): {next_step}") from None


def be_worker(options: Mapping[str, Any]) -> NoReturn:
    """This process becomes the load process of a worker, and ends with its load."""
    place = ("--master-host", options["master_host"], "--master-port", str(options["master_port"]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvbench.load", "--worker", *place])
