"""This module writes files that survive, and finds damage in them before they are used. Every file
that a process of ours writes and reads again carries a digest.

    write_durably     all of a file or nothing; `remove_drafts`        written_durably
    write_sealed      JSON whose last key is the digest of the rest    read_sealed
    sealed            the same for bytes, as one line of a file        unsealed, read_lines
    write_sidecar     PATH.sha256 beside a file in others' format      check_sidecar
    seal              checksums.json: SHA-256 of a folder's files      check

    {"version":7,"path":"…/v7","digest":"5f0c1d2e3b4a5968"}

A sealed file or line is plain JSON. The digest is XXH3-64 of all bytes before it, so that a changed
space is found, too. Damage is a `DamagedFileError` that names the file and the remedy.

Owns the formats of digests. Does not own what the files mean. The journal has checksums of its own
(`store/`); files that a user edits have none.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import orjson
import psutil
from xxhash import xxh3_64_hexdigest

from stepwell.datapool.errors import DamagedFileError

CHECKSUMS = "checksums.json"
SIDECAR = ".sha256"
N_THREADS = 4
_SEAL = b'"digest":"%s"}\n'
_SEAL_BYTES = len(_SEAL % bytes(16))
_SEAL_AND_MORE = re.compile(rb'"digest":"[0-9a-f]{16}"\}.\Z', re.DOTALL)
_SEAL_END = re.compile(rb'"digest":"[^"]{16}"\}\n\Z', re.DOTALL)
_DRAFT = re.compile(r"\.(\d+@.+)-\d+\.tmp\Z")
LEFT_S = 86_400.0
"""Age at which a draft of another machine was left by whoever wrote it."""
_SIDECAR_LINE = re.compile(rb"([0-9a-f]{64})  [^\n]+\n")


def write_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write all of a file or nothing, whenever the process or the machine dies.

    Args:
        private: only its owner may read it.
    """
    with written_durably(path, private=private) as file:
        file.write(content)


@contextmanager
def written_durably(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to be written, which appears as `path` at the end of the block, durably; if the block
    raises, nothing does. Until then it is `PATH.….tmp`, which `remove_drafts` knows."""
    draft = path.with_name(f"{path.name}.{this_writer()}-{threading.get_native_id()}.tmp")
    mode = 0o600 if private else 0o666
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:  # also an interrupt: no draft is left
        draft.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def remove_drafts(folder: Path, names: Collection[str]) -> None:
    """Remove what processes were writing when they were killed, in `folder` and below those of its
    folders that `names` has. Links are not followed; folders may vanish meanwhile."""
    for path, folders, files in os.walk(folder):
        if path == str(folder):
            folders[:] = [name for name in folders if name in names]
        for file in files:
            draft = Path(path, file)
            if (writer := _DRAFT.search(file)) is not None and was_killed(writer[1], draft):
                draft.unlink(missing_ok=True)


def this_writer() -> str:
    """Name of this process among all that write into a folder: its number, and its machine, or the
    namespace of processes where there are some, since a container's have numbers of their own."""
    return f"{os.getpid()}@{_machine()}"


def was_killed(writer: str, draft: Path) -> bool:
    """Return true if the writer of a draft, by its `this_writer`, was killed. Of another machine,
    which shares the folder, it cannot be told: its draft has to be a day old."""
    pid, _, machine = writer.partition("@")
    if machine == _machine():
        return not psutil.pid_exists(int(pid))
    try:
        return time.time() - draft.stat().st_mtime > LEFT_S
    except FileNotFoundError:  # it is finished
        return False


def _machine() -> str:
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def fsync(path: Path) -> None:
    """A file's content, or a folder's entries, survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- files with their digest inside ---------------------------------------------------------------


def sealed(content: bytes) -> bytes:
    """A JSON object with its digest as its last key, and a line end; other bytes with the same
    behind them."""
    body = content.rstrip()
    if body[:1] == b"{" and body[-1:] == b"}":
        body = body[:-1].rstrip()
        content = body if body == b"{" else body + b","
    return content + _SEAL % xxh3_64_hexdigest(content).encode()


def unsealed(data: bytes) -> bytes:
    """Return the bytes that `sealed` was given: a JSON object without spaces at its ends, or
    others.

    Raises:
        ValueError: it is not what `sealed` made.
    """
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL % xxh3_64_hexdigest(content).encode():
        raise ValueError("the digest is not that of the content")
    return content.removesuffix(b",") + b"}" if content[:1] == b"{" else content


def is_sealed(data: bytes) -> bool:
    """True if the bytes end as `sealed` ends them, damaged or not."""
    return _SEAL_END.search(data, max(0, len(data) - _SEAL_BYTES)) is not None


def write_sealed(path: Path, content: Any) -> None:
    """Write a JSON object durably, for `read_sealed`."""
    write_durably(path, sealed_json(content))


def sealed_json(content: Any) -> bytes:
    """A JSON object, laid out for people, with its digest."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return sealed(orjson.dumps(content, option=options))


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file that `write_sealed` wrote.

    Args:
        remedy: ends the message of the error: what a user does about the damage.

    Raises:
        DamagedFileError: it is not what was written.
        FileNotFoundError: there is no such file.
    """
    return checked_json(path.read_bytes(), path, remedy)


def checked_json(data: bytes, path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in the sealed bytes of `path`. Raises DamagedFileError as `read_sealed`."""
    try:
        found: dict[str, Any] = orjson.loads(unsealed(data))
    except ValueError as e:
        raise damaged(path, str(e), remedy) from e
    return found


def damaged(path: Path, why: str, remedy: str) -> DamagedFileError:
    """The error of a file that is not what was written."""
    return DamagedFileError(f"{path} is damaged ({why}); {remedy}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Offset and content of each sealed line; None: it is damaged. A last line that has no end is
    being written, or its writer died, and is left out.

    Raises:
        FileNotFoundError: there is no such file.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                try:
                    yield offset, unsealed(line)
                except ValueError:
                    yield offset, None
            elif _SEAL_AND_MORE.search(line):  # its end was there, and has been changed
                yield offset, None
            offset += len(line)


def end_of_lines(file: IO[bytes]) -> int:
    """Bytes of a file up to the end of its last whole line."""
    end = at = file.seek(0, os.SEEK_END)
    while at:
        start = max(0, at - 4096)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return min(end, start + found + 1)
        at = start
    return 0


# -- files in a format of others ------------------------------------------------------------------


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR)


def write_sidecar(path: Path) -> None:
    """Write the digest of a file beside it, durably, as `sha256sum` does: `sha256sum -c` takes
    it."""
    write_durably(sidecar_of(path), f"{_digest(path)}  {path.name}\n".encode())


def check_sidecar(path: Path, remedy: str) -> None:
    """Hold a file against the digest beside it; no-op if there is none.

    Raises:
        DamagedFileError: the file or its sidecar is damaged.
        OSError: one of them cannot be read.
    """
    sidecar = sidecar_of(path)
    if not sidecar.exists():
        return
    noted = _SIDECAR_LINE.fullmatch(sidecar.read_bytes())
    if noted is None:
        raise damaged(sidecar, "it is no line of sha256sum", remedy)
    if noted[1].decode() != _digest(path):
        raise damaged(path, f"it does not have the digest in {sidecar.name}", remedy)


# -- folders --------------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Write the checksums of the files in `folder`, durably."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    listed = folder / CHECKSUMS
    listed.write_bytes(sealed_json(digests(files)))
    fsync(listed)


def digests(files: Sequence[Path]) -> dict[str, str]:
    """Names of `files` with their SHA-256, as `seal` lists them."""
    return {path.name: digest for path, digest in _digests(files)}


def check(folder: Path, remedy: str, names: Iterable[str] | None = None) -> None:
    """Hold the files against their checksums.

    Args:
        names: only these files; None: all that are listed.

    Raises:
        DamagedFileError: a file is damaged or missing.
        OSError: a file cannot be read.
    """
    try:
        listed = read_sealed(folder / CHECKSUMS, remedy)
    except FileNotFoundError as e:
        raise DamagedFileError(
            f"{folder / CHECKSUMS} is missing: an older release, or nobody, sealed the folder; "
            f"{remedy}"
        ) from e
    paths = [folder / name for name in (listed if names is None else names)]
    for path in paths:
        if path.name not in listed:
            raise DamagedFileError(f"{path} has no checksum in {CHECKSUMS}; {remedy}")
        if not path.is_file():
            raise DamagedFileError(f"{path} is missing; {remedy}")
    for path, digest in _digests(paths):
        if digest != listed[path.name]:
            raise damaged(path, f"it does not have the checksum of {CHECKSUMS}", remedy)


def _digests(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Several files at once: hashing leaves the interpreter free."""
    with ThreadPoolExecutor(N_THREADS) as pool:
        yield from zip(paths, pool.map(_digest, paths), strict=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
