"""This module writes files that survive, and seals a folder of them with their checksums, so that
a byte that changed on disk is found before it is used.

    write_durably    all of a file or nothing
    seal(folder)     writes checksums.json: the SHA-256 of every file, and of the list itself
    check(folder)    reads them all again and holds them against it

Owns `checksums.json`. Does not own what the files mean: checkpoints and weight versions are sealed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "checksums.json"
N_THREADS = 4


class ChecksumError(ValueError):
    """A file is not what was written."""


def write_durably(path: Path, content: bytes) -> None:
    """All of it or nothing, whenever the process or the machine dies."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(content)
    fsync(draft)
    draft.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """A file's content, or a folder's entries, survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def seal(folder: Path) -> None:
    """Write the checksums of the files in `folder`, durably."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    listed = folder / CHECKSUMS
    listed.write_text(sealed_json({path.name: digest for path, digest in _digests(files)}))
    fsync(listed)


def check(folder: Path, names: Iterable[str] | None = None) -> None:
    """Hold the files against their checksums.

    Args:
        names: only these files; None: all that are listed.

    Raises:
        ChecksumError: a file is damaged or missing; the message names it.
        OSError: a file cannot be read.
    """
    listed = _read(folder / CHECKSUMS)
    paths = [folder / name for name in (listed if names is None else names)]
    for path in paths:
        if path.name not in listed:
            raise ChecksumError(f"{path} has no checksum in {CHECKSUMS}")
        if not path.is_file():
            raise ChecksumError(f"{path} is missing")
    for path, digest in _digests(paths):
        if digest != listed[path.name]:
            raise ChecksumError(f"{path} is damaged: it does not have the checksum of {CHECKSUMS}")


def checked_json(text: str) -> object:
    """What `sealed_json` made.

    Raises:
        ValueError: it is not what was written.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or sealed_json(found.get("content")) != text:
        raise ValueError("the checksum is not that of the content")
    return found["content"]


def sealed_json(content: object) -> str:
    """`content` as JSON with its checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, sort_keys=True, indent=1) + "\n"


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ChecksumError(f"{path} is missing; an older release, or nobody, sealed the folder")
    try:
        listed = checked_json(path.read_text())
    except ValueError as e:  # also text that is no UTF-8
        raise ChecksumError(f"{path} is damaged ({e})") from e
    if not isinstance(listed, dict):
        raise ChecksumError(f"{path} is damaged: it is no list of checksums")
    return listed


def _digests(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Several files at once: hashing leaves the interpreter free."""
    with ThreadPoolExecutor(N_THREADS) as pool:
        yield from zip(paths, pool.map(_digest, paths), strict=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
