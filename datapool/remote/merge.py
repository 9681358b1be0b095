"""Statistics of several shards as those of one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stepwell.datapool.core.channel import N_OLDEST_OPEN

_MERGE: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "policy_version": max,
    "oldest_policy_version_ready": lambda versions: min(
        (v for v in versions if v is not None), default=None
    ),
    "oldest_open_age_s": max,
    "oldest_open": lambda lists: sorted(
        (group for groups in lists for group in groups), key=lambda g: -g["age_s"]
    )[:N_OLDEST_OPEN],
    "shut_down": all,
    # A consumer waits at every shard.
    "waiting": lambda counts: {k: max(c[k] for c in counts) for k in counts[0]},
}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of one channel: counts are added, of the rest `_MERGE` says what."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key in _MERGE:
            result[key] = _MERGE[key](values)
        elif isinstance(values[0], Mapping):
            result[key] = merged(values)
        else:
            result[key] = sum(values)
    return result
