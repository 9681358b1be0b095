"""Key/value memory: one row per request, and finished rows kept as reusable prefixes.

Rows are dense so that decoding attends to plain slices, without a gather::

    row   0 … n_active-1      running requests
          n_active … n_rows-1 retained: KV of finished requests, least recently used goes first

A new request looks for the row, running or retained, that shares the longest token prefix. GRPO
rollouts share their prompt, and turn k+1 extends turn k, whose row it takes over without a copy.
A row whose KV was computed under replaced weights is never a donor, nor is one of another salt.
Tokens are `shadow_ids` where there are pictures: two of one size have the same placeholders.

Worked example, 4 rows: A and B run in rows 0 and 1. A ends: B's row moves to 0, A's KV to row 1,
n_active = 1. A's next turn arrives: it extends row 1 wholly, so it takes over row 1 in place.

`KVCache` is a transformers `Cache`: a model's own forward writes and reads through `update`.
Memory on CPU comes from calloc, so rows and positions never written cost nothing. Does not know
requests, sampling or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_SHARED_PREFIX = 4
"""A shorter shared prefix is cheaper to recompute than to copy."""
_CAPACITY_STEP = 256


@dataclass(slots=True)
class WritePlan:
    """Places that one forward writes to and those it may read."""

    rows: torch.Tensor
    """Row of each batch entry, shape [B]."""
    positions: torch.Tensor
    """Write position of each query token, shape [B, S]."""
    kv_len: int
    """Attention reads positions [0, kv_len)."""
    read: slice | None
    """The rows as a slice when they are adjacent (no copy), else None."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Ordinary tensors: rows are also moved between steps, outside of inference mode.
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # np.zeros is calloc: pages are committed when first written; torch.zeros touches them all.
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(np.zeros(n_bytes, dtype=np.uint8)).view(dtype).view(shape)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is untyped
    """One layer's keys and values, shape [rows, kv heads, capacity, head dim]."""

    def __init__(self, owner: KVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers is untyped
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def alloc(like: torch.Tensor) -> torch.Tensor:
            shape = (self.owner.n_rows, like.shape[1], self.owner.capacity, like.shape[3])
            return _zeros(shape, like.dtype, like.device)

        self.keys, self.values = alloc(key_states), alloc(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.owner.plan
        if self.keys is None or self.values is None or plan is None:
            raise RuntimeError("the cache was used outside of a planned forward")
        if key_states.shape[2] == 1:
            rows, at = plan.rows, plan.positions[:, 0]
            self.keys[rows, :, at] = key_states[:, :, 0]
            self.values[rows, :, at] = value_states[:, :, 0]
        else:
            rows, at = plan.rows[:, None], plan.positions
            self.keys[rows, :, at] = key_states.transpose(1, 2)
            self.values[rows, :, at] = value_states.transpose(1, 2)
        if plan.read is not None:
            return self.keys[plan.read, :, : plan.kv_len], self.values[plan.read, :, : plan.kv_len]
        return (
            self.keys[:, :, : plan.kv_len].index_select(0, plan.rows),
            self.values[:, :, : plan.kv_len].index_select(0, plan.rows),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.owner.plan.kv_len if self.owner.plan else 0), 0

    def get_seq_length(self) -> int:
        return self.owner.plan.kv_len if self.owner.plan else 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    def drop(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def copy_row(self, src: int, dst: int, n: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[dst, :, :n] = self.keys[src, :, :n]
            self.values[dst, :, :n] = self.values[src, :, :n]

    def swap_rows(self, a: int, b: int, n: int) -> None:
        for tensor in (self.keys, self.values):
            if tensor is not None:
                kept = tensor[a, :, :n].clone()
                tensor[a, :, :n] = tensor[b, :, :n]
                tensor[b, :, :n] = kept

    def grow(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = _zeros((*old.shape[:2], capacity, old.shape[3]), old.dtype, old.device)
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)


class KVCache(Cache):
    """Rows of keys and values with prefix reuse; see the module docstring."""

    def __init__(
        self, n_layers: int, max_running: int, n_retained: int, dtype: type[Any] = np.int32
    ) -> None:
        """`max_running` rows for requests and `n_retained` for finished ones; `dtype` of tokens."""
        self.n_rows = max_running + n_retained
        self.max_running = max_running
        self.capacity = _CAPACITY_STEP
        self.plan: WritePlan | None = None
        self.n_active = 0
        self.tokens = np.zeros((self.n_rows, self.capacity), dtype=dtype)
        self.salt = np.zeros(self.n_rows, dtype=np.int64)
        """Rows share prefixes with those of their own salt only."""
        self.kv_len = np.zeros(self.n_rows, dtype=np.int64)
        self.planned = np.zeros(self.n_rows, dtype=np.int64)
        """Tokens of a running row that prefill will have computed; 0 for a retained row."""
        self.fresh = np.ones(self.n_rows, dtype=bool)
        """False once part of the row's KV comes from replaced weights."""
        self._used = np.zeros(self.n_rows, dtype=np.int64)
        self._tick = 0
        self._slots = [_SlotLayer(self) for _ in range(n_layers)]
        super().__init__(layers=list(self._slots))

    # -- rows ---------------------------------------------------------------------------------

    def _shared(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Leading tokens that each row has in common with `tokens`, computed or not."""
        n = min(len(tokens), self.capacity)
        differs = self.tokens[:, :n] != tokens[:n]
        return np.where(differs.any(axis=1), differs.argmax(axis=1), n) if n else self.kv_len * 0

    def worth_waiting(self, tokens: npt.NDArray[Any], salt: int = 0) -> bool:
        """A running row is about to compute much more of `tokens`' prefix than is stored now."""
        shared = np.where(self.fresh & (self.salt == salt), self._shared(tokens), 0)
        ready = int(np.minimum(shared, self.kv_len).max(initial=0))
        coming = int(np.minimum(shared, self.planned)[: self.n_active].max(initial=0))
        return coming - ready >= max(16, len(tokens) // 8)

    def longest_prefix(self, tokens: npt.NDArray[Any], salt: int = 0) -> tuple[int, int]:
        """`(row, n)`: the row that shares the most leading tokens, n of them (0: none does)."""
        usable = self.fresh & (self.salt == salt)
        shared = np.where(usable, np.minimum(self._shared(tokens), self.kv_len), 0)
        # Among equals prefer a retained row: it may be taken over without a copy.
        row = self.n_rows - 1 - int(shared[::-1].argmax())
        return row, int(shared[row])

    def acquire(self, tokens: npt.NDArray[Any], max_reuse: int, salt: int = 0) -> int:
        """Open the next row for a request that will hold `tokens`; returns the row. Up to
        `max_reuse` leading tokens may come from another row of this salt: `kv_len[row]` says how
        many did."""
        if self.n_active >= self.max_running:
            raise RuntimeError(f"all {self.max_running} rows run; release one first")
        self.ensure_capacity(len(tokens) + 1)
        row = self.n_active
        src, n = self.longest_prefix(tokens[: max(0, max_reuse)], salt)
        if n < MIN_SHARED_PREFIX:
            n = 0
        if n and src >= row and self.kv_len[src] == n:
            self._swap(src, row)
        else:
            self._vacate(row, keep=src if n else None)
            if n:
                self._touch(src)
            if n and src != row:
                self._copy(src, row, n)
        self.kv_len[row], self.planned[row], self.fresh[row] = n, len(tokens), True
        self.tokens[row, : len(tokens)] = tokens
        self.salt[row] = salt
        self.n_active += 1
        return row

    def release(self, row: int, *, retain: bool) -> int | None:
        """Close a running row. The last running row moves into its place: returns that row's old
        index, or None if `row` was the last. A fresh row's KV is retained as a prefix."""
        last = self.n_active - 1
        if not retain or not self.fresh[row]:
            self.kv_len[row] = 0
        if row != last:
            self._swap(row, last)
        self.n_active = last
        self.planned[last] = 0
        self._touch(last)
        return last if row != last else None

    def forget_retained(self) -> None:
        """Drop the KV of all finished requests."""
        self.kv_len[self.n_active :] = 0
        self.fresh[self.n_active :] = True

    def drop(self) -> None:
        """Free the memory of all keys and values, with no row running; the next forward takes it
        again."""
        self.kv_len[:] = 0
        self.fresh[:] = True
        for layer in self._slots:
            layer.drop()

    def mark_stale(self) -> None:
        """The weights were replaced: no KV computed so far may serve another request."""
        self.forget_retained()
        self.fresh[: self.n_active] = self.kv_len[: self.n_active] == 0

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` positions in every row."""
        if length <= self.capacity:
            return
        capacity = max(2 * self.capacity, -(-length // _CAPACITY_STEP) * _CAPACITY_STEP)
        tokens = np.zeros((self.n_rows, capacity), dtype=self.tokens.dtype)
        tokens[:, : self.capacity] = self.tokens
        for layer in self._slots:
            layer.grow(capacity)
        self.tokens, self.capacity = tokens, capacity

    # -- moves --------------------------------------------------------------------------------

    def _touch(self, row: int) -> None:
        self._tick += 1
        self._used[row] = self._tick

    def _vacate(self, row: int, keep: int | None) -> None:
        """Free `row`, the first retained one, at the cost of the least recently used retained row
        other than `keep`. Afterwards `row`'s KV is still readable if `keep` is `row`."""
        if not self.kv_len[row]:
            return
        others = [r for r in range(row + 1, self.n_rows) if r != keep]
        if not others:
            return
        victim = min(others, key=lambda r: (self.kv_len[r] > 0, self._used[r]))
        if keep == row or not self.kv_len[victim] or self._used[victim] < self._used[row]:
            self._copy(row, victim, int(self.kv_len[row]))
            self._used[victim] = self._used[row]

    def _copy(self, src: int, dst: int, n: int) -> None:
        for layer in self._slots:
            layer.copy_row(src, dst, n)
        self.tokens[dst, :n] = self.tokens[src, :n]
        self.kv_len[dst], self.fresh[dst], self.salt[dst] = n, self.fresh[src], self.salt[src]

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        na, nb = int(self.kv_len[a]), int(self.kv_len[b])
        for layer in self._slots:
            if not na or not nb:
                layer.copy_row(*((a, b, na) if na else (b, a, nb)))
            else:
                layer.swap_rows(a, b, max(na, nb))
        pair, riap = [a, b], [b, a]
        self.tokens[pair] = self.tokens[riap]
        for column in (self.kv_len, self.planned, self.fresh, self.salt, self._used):
            column[pair] = column[riap]
