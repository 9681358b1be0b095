"""Log files of a part of a run: what it logs and prints. Imports nothing of ours."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

LOG_BYTES = 16 << 20
"""Most bytes of a log file; the one before it is kept as `NAME.log.1`."""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write what is logged inside the block to the file `path`, too: Stepwell's from INFO on,
    everybody else's warnings. What the console shows stays as it is."""
    root, ours = logging.getLogger(), logging.getLogger("stepwell")
    handler, before = _file_handler(path), ours.level
    added: list[logging.Handler] = [handler]
    if not root.handlers and logging.lastResort is not None:
        added.append(logging.lastResort)  # what Python uses as long as there is no handler
    for each in added:
        root.addHandler(each)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        for each in added:
            root.removeHandler(each)
        handler.close()


def log_to_file(path: Path | None) -> None:
    """Write what this process logs, as in `logging_to`, and what it prints to the file `path`, too,
    from now on: Ray's own logs are elsewhere, and an agent's `print` is looked for here. A folder
    that cannot be written, on another machine, is no reason to run nothing.

    Args:
        path: None does nothing.
    """
    if path is None:
        return
    try:
        handler = _file_handler(path)
    except OSError as e:
        logging.getLogger(__name__).warning("%s cannot be written (%s); see Ray's logs", path, e)
        return
    root = logging.getLogger()
    if not root.handlers:
        console = logging.StreamHandler(sys.stderr)  # as it is now: not through `_Printed`
        console.setLevel(logging.WARNING)
        root.addHandler(console)
    root.addHandler(handler)
    logging.getLogger("stepwell").setLevel(logging.INFO)
    sys.stdout = cast(TextIO, _Printed(sys.stdout, "stdout", handler))
    sys.stderr = cast(TextIO, _Printed(sys.stderr, "stderr", handler))


def numbered_log(folder: Path | None, name: str, k: int, n: int) -> Path | None:
    """The log file of number `k` of `n` parts of one kind."""
    if folder is None:
        return None
    return folder.absolute() / (f"{name}.log" if n == 1 else f"{name}_{k}.log")


def _file_handler(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")
    )
    return handler


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name in logging
        # A full disk loses lines and ends no part; to say so is to print, which is logged, too.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        # The last lines do not fit: what ended the run is said elsewhere, and is not hidden by it.
        with suppress(OSError):
            super().close()


class _Printed:
    """A standard stream whose whole lines are written to a log, too."""

    def __init__(self, stream: TextIO, name: str, handler: logging.Handler) -> None:
        self._stream = stream
        self._name = name
        self._handler = handler
        self._line = ""

    def write(self, text: str) -> int:
        *lines, line = (self._line + text).split("\n")
        self._line = line.rpartition("\r")[2]  # of a progress bar, what the terminal shows
        for line in filter(None, (line.rstrip("\r").rpartition("\r")[2] for line in lines)):
            record = logging.LogRecord(self._name, logging.INFO, "", 0, line, None, None)
            self._handler.handle(record)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # `flush`, `buffer`, `reconfigure`, …
