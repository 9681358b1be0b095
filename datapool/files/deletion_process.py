"""The deletion of trajectories from a run's files as a process of its own:
`python -m stepwell.datapool.files.deletion_process`. For a gateway, whose calls must not wait for
files to be written anew. Standard input is JSON: `archive` and `run`, two folders or null, and
`uids`, with true for those that go with their groups. Standard output is JSON: the uids that went,
those of siblings among them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stepwell.datapool.files.copies import TrainerCopies

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    gone: dict[str, None] = {}
    for with_group in (True, False):
        uids = [uid for uid, is_whole in asked["uids"].items() if is_whole is with_group]
        archived: list[str] = []
        if asked["archive"] is not None:
            from stepwell.datapool.files.archive.reader import ArchiveReader

            reader = ArchiveReader(Path(asked["archive"]))
            archived = reader.delete("trajectory", *uids, with_group=with_group)
        gone |= dict.fromkeys(archived)
        if asked["run"] is not None:
            copies = TrainerCopies(Path(asked["run"]))
            every = dict.fromkeys((*uids, *archived))
            gone |= dict.fromkeys(copies.delete("trajectory", *every, with_groups=with_group))
    json.dump(list(gone), sys.stdout)
