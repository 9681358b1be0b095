"""This module tells the pool's time so that leases and deadlines last as long as they were given,
whatever is done to the wall clock.

    first start                    the wall clock says when; from then on the machine's steady clock
                                   counts, which nobody corrects
    restart, the machine ran on    goes on as if the process had never ended
    restart, the machine rebooted  the wall clock again, but not before what was written last

So `now` never goes back, and a lease of 600 s is over after 600 s of a running machine, restarts of
the pool included. Times are seconds since 1970 by the wall clock of the first start: for people,
not to be compared with another clock.
"""

from __future__ import annotations

import pickle
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

STATE = "clock"
"""The clock's name among the journal's states."""


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes | None:
    """16 bytes that change when the machine restarts; None where the kernel does not say."""
    try:
        return uuid.UUID(BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds, from a steady clock."""

    boot: bytes | None
    """`boot_id` of the machine whose steady clock this is; None (not Linux): every restart
    counts as a reboot."""
    offset: float
    """Seconds added to the steady clock."""

    @classmethod
    def start(cls, not_before: float = 0.0) -> Clock:
        """A clock that begins with the wall clock, or with `not_before` if that is later."""
        return cls(boot_id(), max(time.time(), not_before) - time.monotonic())

    @classmethod
    def resume(cls, state: bytes | None, not_before: float) -> Clock:
        """The clock that `dump` wrote, if its machine has not rebooted since; else a new one."""
        if state is not None:
            boot, offset = pickle.loads(state)
            if boot is not None and boot == boot_id():
                return cls(boot, offset)
        return cls.start(not_before)

    def dump(self) -> bytes:
        return pickle.dumps((self.boot, self.offset))

    def now(self) -> float:
        return time.monotonic() + self.offset
