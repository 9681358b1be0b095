"""Errors of the DataPool.

Every error names the field or id, its value and the remedy, survives pickling (they cross Ray)
and also subclasses the matching built-in::

    DataPoolError
    ├── InvalidStepError(ValueError)          a Step that cannot be trained on
"""

from __future__ import annotations


class DataPoolError(Exception):
    """Base of all errors that the DataPool raises."""


class InvalidStepError(DataPoolError, ValueError):
    """A Step's field is malformed."""
