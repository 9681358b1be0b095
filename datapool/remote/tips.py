"""The steps sent last, so that what follows them is sent relative to them (`codec.py`)."""

from __future__ import annotations

from collections import OrderedDict

from stepwell.datapool.codec import PackedStep, Tokens, as_bytes, pack
from stepwell.datapool.types import Step

TIP_BYTES = 64 << 20
"""Tokens that are kept; the trajectories that were added to longest ago go first."""


class Tips:
    """Tokens of recent steps by trajectory."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], dict[int, Tokens]] = OrderedDict()
        """(channel, trajectory_uid) -> step_index -> tokens"""
        self._n_bytes = 0

    def pack(self, step: Step, channel: str) -> PackedStep:
        key = channel, step.trajectory_uid
        known = self._tokens.get(key, {})
        base = step.step_index - 1 if step.parent_index is None else step.parent_index
        packed = pack(step, known.get(base))
        if step.is_last:
            self._end(key)
            return packed
        tokens = Tokens(
            step.step_index,
            as_bytes(step.prompt_ids),
            as_bytes(step.response_ids),
            packed.header.crc,
        )
        self._n_bytes += _size(tokens) - _size(known.get(step.step_index))
        self._tokens.setdefault(key, known)[step.step_index] = tokens
        self._tokens.move_to_end(key)
        while self._n_bytes > TIP_BYTES and len(self._tokens) > 1:
            self._end(next(iter(self._tokens)))
        return packed

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        self._end((channel, trajectory_uid))

    def clear(self) -> None:
        self._tokens.clear()
        self._n_bytes = 0

    def _end(self, key: tuple[str, str]) -> None:
        self._n_bytes -= sum(map(_size, self._tokens.pop(key, {}).values()))


def _size(tokens: Tokens | None) -> int:
    return 0 if tokens is None else len(tokens.prompt) + len(tokens.response)
