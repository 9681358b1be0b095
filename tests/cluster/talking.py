"""`python -m tests.cluster.talking URL FILE`: clients of a gateway (`tests/chaos/talkers.py`) until
SIGTERM. FILE has what they were answered, a line per conversation, and is written each second.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.chaos.talkers import Talkers, as_lines
from tests.cluster.driving import KEY


async def talk(url: str, file: Path) -> None:
    talkers = Talkers(url, 7, KEY)
    draft = file.with_suffix(".draft")

    def write() -> None:
        draft.write_text(as_lines(talkers.talks))
        os.replace(draft, file)

    async def write_often() -> None:
        while True:
            await asyncio.sleep(1.0)
            write()

    both = asyncio.gather(talkers.run(), write_often())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, both.cancel)
    with suppress(asyncio.CancelledError):
        await both
    write()


if __name__ == "__main__":
    asyncio.run(talk(sys.argv[1], Path(sys.argv[2])))
