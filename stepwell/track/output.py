"""This module prints lines whose reader may go before the end, as `head`, a `tee` that Ctrl-C ended
and a terminal that was closed do: whoever prints goes on. Loads nothing."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO


def print_line(text: str, stream: TextIO | None = None) -> bool:
    """Print `text` and a line end; False: nobody reads any more.

    Args:
        stream: None: stdout.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as e:
        if not has_no_reader(e):
            raise
        print_nowhere(stream)
        return False
    return True


def has_no_reader(error: OSError) -> bool:
    """Return true for the error of a pipe, or of a terminal, that nobody reads any more."""
    return error.errno in (errno.EPIPE, errno.EIO)


def print_nowhere(stream: TextIO | None = None) -> None:
    """Discard what is printed from now on, and what Python flushes at its end.

    Args:
        stream: None: stdout.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())
