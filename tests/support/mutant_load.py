"""The load process with a client that is broken in one way, which the calibration or the load must notice.

    python tests/support/mutant_load.py NAME ARGUMENTS      as those of python -m kvbench.load

The product knows nothing of this: the class of the session's clients is replaced before the load starts.
"""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gevent  # noqa: E402

from kvbench.load import client, process, session  # noqa: E402
from kvbench.load.client import StreamingClient  # noqa: E402
from kvbench.load.run import main  # noqa: E402

really_sleep = monkey.get_original("time", "sleep")


class Slow(StreamingClient):
    """Takes 3 ms for every read, more than its streams' chunks leave it: bytes pile up."""

    def _on_readable(self):
        really_sleep(0.003)
        super()._on_readable()


class Early(StreamingClient):
    """Stamps 2 ms before the bytes' arrival, as a wrong conversion between two clocks does."""

    def _on_readable(self):
        before = len(self.raw.times)
        super()._on_readable()
        for i in range(before, len(self.raw.times)):
            self.raw.times[i] -= 0.002


class Stampless(StreamingClient):
    """Loses the kernel's stamps, while its loop is blocked for 10 ms in every 20."""

    blocker = None

    def connect(self):
        super().connect()
        receive = self._connection._recvmsg

        def without_stamps(*sizes):
            data, _, flags, sender = receive(*sizes)
            return data, [], flags, sender

        self._connection._recvmsg = without_stamps
        if Stampless.blocker is None:
            Stampless.blocker = gevent.spawn(self._block)

    @staticmethod
    def _block():
        while True:
            really_sleep(0.010)
            gevent.sleep(0.010)


class Tardy(StreamingClient):
    """Sends 10 ms after it should."""

    def exchange(self, *arguments):
        gevent.sleep(0.010)
        return super().exchange(*arguments)


def retry_what_was_dropped():
    """Sends again whatever came to nothing on a kept connection, as if the server had never had it."""
    client._CROSSED_S = float("inf")


def block_the_loop():
    """From the load's start its loop is held for 20 ms in every 25, as on a core that others have, too.

    Chunks keep the kernel's stamps; what comes late is every send.
    """
    begin = process.Measuring.begin

    def hold():
        while True:
            really_sleep(0.020)
            gevent.sleep(0.005)

    def begin_and_hold(measuring, zero=None):
        begin(measuring, zero)
        gevent.spawn(hold)

    process.Measuring.begin = begin_and_hold


def die_at_the_start():
    """Its heartbeats go on, but nothing is measured."""

    def out_of_files(*_):
        raise OSError(24, "Too many open files")

    process.Measuring.begin = out_of_files


CLIENTS = {"slow": Slow, "early": Early, "stampless": Stampless, "tardy": Tardy}
PATCHES = {
    "blocked": block_the_loop, "secretly retrying": retry_what_was_dropped, "dying": die_at_the_start,
    "none": lambda: None,
}  # fmt: skip

if __name__ == "__main__":
    name = sys.argv[1]
    if name in CLIENTS:
        session.StreamingClient = CLIENTS[name]
    else:
        PATCHES[name]()
    assert time.sleep is not really_sleep  # gevent has patched
    sys.exit(main(sys.argv[2:]))
