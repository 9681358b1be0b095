"""The deletion of trajectories from an archive as a process of its own:
`python -m stepwell.datapool.files.archive.deletion FOLDER`. For a gateway, whose calls must not
wait for files to be written anew. Standard input is JSON: uids, and true for those that go with
their groups. Standard output is JSON: the uids that went, those of siblings among them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stepwell.datapool.files.archive.reader import ArchiveReader

if __name__ == "__main__":
    asked: dict[str, bool] = json.load(sys.stdin)
    reader = ArchiveReader(Path(sys.argv[1]))
    gone: list[str] = []
    for with_group in (True, False):
        uids = [uid for uid, is_whole in asked.items() if is_whole is with_group]
        gone += reader.delete("trajectory", *uids, with_group=with_group)
    json.dump(gone, sys.stdout)
