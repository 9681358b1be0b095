"""Errors of the shell: `RunUnavailableError`. Those of the rooms are in each room's `errors.py`."""

from __future__ import annotations


class RunUnavailableError(ConnectionError):
    """There is no run to connect to: the folder has none, it has ended, or it is out of reach."""
