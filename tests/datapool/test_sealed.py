"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.datapool.sealed import remove_drafts, write_durably, written_durably

KILLED = """
import os, signal, sys
from pathlib import Path
from stepwell.datapool.sealed import written_durably

with written_durably(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "scores.json"
    path.parent.mkdir()
    write_durably(path, b"whole")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode < 0
    others = path.parent / "notes.7.tmp"
    others.touch()
    (left,) = (
        name for name in os.listdir(path.parent) if name not in ("scores.json", "notes.7.tmp")
    )
    # What a machine writes that shares the folder, where a process of this number may be alive.
    elsewhere, old = (path.parent / left.replace("@", f"@{name}") for name in ("there", "then"))
    elsewhere.touch()
    old.touch()
    os.utime(old, (0, 0))
    with written_durably(path.with_name("other.json")) as file:
        file.write(b"more")
        remove_drafts(tmp_path, ["folder"])
    kept = {"notes.7.tmp", "other.json", "scores.json", elsewhere.name}
    assert set(os.listdir(path.parent)) == kept
    assert path.read_bytes() == b"whole"


def test_drafts_are_looked_for_in_named_folders_alone_which_may_vanish_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, old = tmp_path / "run", "scores.json.1@there-1.tmp"
    drafts = [tmp_path / name / old for name in ("disk", "run", "run/a/b", "run/c", "run/mine")]
    for draft in drafts:
        draft.parent.mkdir(parents=True)
        draft.touch()
        os.utime(draft, (0, 0))
    (run / "a" / "link").symlink_to(tmp_path / "disk")
    scandir = os.scandir

    def vanishes(path: str) -> object:
        if path == str(run / "c"):
            (run / "c" / old).unlink()
            (run / "c").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishes)
    remove_drafts(run, ("c", "a"))
    assert [draft for draft in drafts if draft.exists()] == [drafts[0], drafts[-1]]
