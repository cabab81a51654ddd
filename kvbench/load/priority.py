"""A better priority for the load process while it measures.

Where load and engine share a small machine, bytes that have arrived must be stamped at once and not a time slice
later. The client needs a few per cent of a core, so putting it first costs the engine next to nothing; what was
reached is recorded in load.json.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NICENESS = -10
_REALTIME = 1  # the lowest real-time priority: before every ordinary process, behind every other real-time one


@contextlib.contextmanager
def better_priority(wanted: bool) -> Iterator[str]:
    """Within the block this thread runs first, as far as the system allows; yields what was reached.

    ``realtime`` (SCHED_RR, needs CAP_SYS_NICE), ``nice N`` or ``normal``. The old scheduling comes back after
    the block, so that writing results does not compete with anybody.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        yield _raise() if wanted else "normal"
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _raise() -> str:
    with contextlib.suppress(OSError):
        # Children must not inherit it, hence the flag.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_REALTIME))
        return "realtime"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    now = os.getpriority(os.PRIO_PROCESS, 0)
    return f"nice {now}" if now else "normal"
