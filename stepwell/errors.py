"""Errors of the shell; those of the rooms are in each room's `errors.py`.

RunUnavailableError(ConnectionError)    there is no run to connect to
└── NoRunError(LookupError)             nothing that was named is a run: exit code 2
"""

from __future__ import annotations


class RunUnavailableError(ConnectionError):
    """There is no run to connect to: the folder has none, it has ended, or it is out of reach."""


class NoRunError(RunUnavailableError, LookupError):
    """No run has this name: no folder, a folder without one, or a Ray without one."""
