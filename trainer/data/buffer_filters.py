"""Which returned task is handed out next, and which is given up.

A buffer filter has the signature of slime's `--buffer-filter-path`::

    buffer_filter(config, rollout_id, buffer, num_samples) -> list[Returned]

    config       the source's section of the configuration (slime: all arguments)
    rollout_id   tasks handed out so far (slime: None)
    buffer       what came back, oldest first; the filter's own to change
    num_samples  how many are wanted; more are not taken

What it returns is handed out; what it only takes out of `buffer` is given up, and counted; what it
leaves there stays. An answer with fewer, or none, is filled up from the data set. Where slime's
buffer holds groups of samples, this one holds prompts: the tokens of an interrupted rollout are
with the gateway. (The pool has filters of finished groups: `datapool/selection`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from stepwell.datapool.dotted import resolve
from stepwell.trainer.errors import DataError


@dataclass(frozen=True, slots=True)
class Returned:
    """A task that was handed out and not trained."""

    task: dict[str, Any]
    reason: str = ""
    """Why it came back, e.g. `stale`; "" if nobody said."""
    returns: int = 1
    """How often it came back in this epoch, this time included."""


BufferFilter: TypeAlias = Callable[[Any, int, list[Returned], int], list[Returned]]


def pop_first(
    config: Any, rollout_id: int, buffer: list[Returned], num_samples: int
) -> list[Returned]:
    """In the order they came back."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def pop_least_returned(
    config: Any, rollout_id: int, buffer: list[Returned], num_samples: int
) -> list[Returned]:
    """Those first that came back least often: what keeps failing waits behind the rest."""
    buffer.sort(key=lambda r: r.returns)
    return pop_first(config, rollout_id, buffer, num_samples)


BUFFER_FILTERS: Mapping[str, BufferFilter] = MappingProxyType(
    {"pop_first": pop_first, "pop_least_returned": pop_least_returned}
)


def load_buffer_filter(name: str) -> BufferFilter:
    """The filter registered under `name`, or the function at the dotted path.

    Raises:
        DataError: neither.
    """
    if (known := BUFFER_FILTERS.get(name)) is not None:
        return known
    hint = f"name {' or '.join(BUFFER_FILTERS)}, or a function as package.module:function"
    try:
        found = resolve(name)
    except ImportError as e:
        raise DataError(f"buffer_filter is {name!r}, which cannot be imported ({e}); {hint}") from e
    if not callable(found):
        raise DataError(f"buffer_filter is {name!r}, which is no function; {hint}")
    filter_: BufferFilter = found
    return filter_
