"""The deletion of a trajectory from an archive as a process of its own:
`python -m stepwell.datapool.files.archive.deletion FOLDER UID`. For a gateway, whose calls must not
wait for files to be written anew."""

from __future__ import annotations

import sys
from pathlib import Path

from stepwell.datapool.files.archive.reader import ArchiveReader

if __name__ == "__main__":
    ArchiveReader(Path(sys.argv[1])).delete("trajectory", sys.argv[2])
