"""slime's `args`, as functions of its form (rewards, filters, generate functions) are given them.

Does not own: which arguments each is given.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any


class Arguments(Namespace):
    """slime's command line, as far as a run of Stepwell has it.

    Args:
        remedy: for a function that asks for another argument: where it is set.
        known: by slime's names.
    """

    __slots__ = ("_remedy",)  # `vars(args)` has slime's names only

    def __init__(self, remedy: str, /, **known: Any) -> None:
        self._remedy = remedy
        super().__init__(**known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"args.{name} is not known here; {self._remedy}")
