"""Reads and writes in a folder in which an agent has been, so that what it left there leads nowhere
else: a link out of a sandbox, a pipe that nobody writes to.

Only what no process changes any more is safe: the agent has ended, with all that it started. Does
not own which files these are (`harness.py`, `harbor.py`).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from stepwell.trainer.errors import HarnessError

LARGEST = 1 << 16
"""Bytes of a file that holds a reward."""


def copy_over(source: Path, to: Path) -> None:
    """Copy the content of a folder over that of another; what is in the way, a link for instance,
    is replaced.

    Raises:
        OSError: there is no room.
    """
    make_folder(to)
    for entry in os.scandir(source):
        target = to / entry.name
        if entry.is_dir(follow_symlinks=False):
            copy_over(Path(entry.path), target)
        else:
            remove(target)
            shutil.copy2(entry.path, target, follow_symlinks=False)


def make_folder(folder: Path) -> None:
    """Make `folder` an own folder that can be written, whatever else has its name. Raises
    OSError."""
    if folder.is_symlink() or not folder.is_dir():
        remove(folder)
        folder.mkdir()
    if not os.access(folder, os.W_OK | os.X_OK):
        folder.chmod(0o700)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there, whatever its rights and however deep it is.

    Raises:
        OSError: something of it cannot be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # rm and chmod follow no link, and have no limit of nesting, as functions that recur have.
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
        if not os.path.lexists(path):
            return
    raise OSError(f"the folder {path} cannot be removed")


def inside(root: Path, name: str) -> Path:
    """The file of this name below `root`.

    Raises:
        HarnessError: a link leads out of it.
    """
    file = root / name
    try:
        is_inside = file.parent.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a link to itself
        is_inside = False
    if not is_inside:
        raise HarnessError(f"grading: {name} leads out of the work folder, by a link")
    return file


def read_written(file: Path) -> str:
    """The text that grading wrote into `file`.

    Raises:
        OSError: it is not there, or no plain file.
        ValueError: it is no text, or too long.
    """
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(opened, "rb") as reader:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(f"{file.name} is no plain file")
        text = reader.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"{file.name} has more than {LARGEST} bytes")
    return text.decode()
