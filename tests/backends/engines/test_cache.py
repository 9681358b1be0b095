"""Rows of the key/value cache: which prefix is reused, who is evicted, what an update forbids."""

from __future__ import annotations

import numpy as np
import torch

from stepwell.backends.engines.embedded.cache import KVCache, WritePlan


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def count(start: int, n: int) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.int32)


class Filled(KVCache):
    """A cache whose keys at each position are the token ids themselves, so moves can be checked."""

    def __init__(self, max_running: int = 2, n_retained: int = 2) -> None:
        super().__init__(1, max_running, n_retained)

    def open(self, tokens: np.ndarray) -> tuple[int, int]:
        """Acquire a row and compute what was not reused; `(row, reused)`."""
        row = self.acquire(tokens, len(tokens) - 1)
        reused = int(self.kv_len[row])
        at = torch.arange(reused, len(tokens))[None]
        self.plan = WritePlan(torch.tensor([row]), at, len(tokens), slice(row, row + 1))
        states = torch.from_numpy(tokens[reused:].astype(np.float32))[None, None, :, None]
        self.update(states, states, 0)
        self.kv_len[row] = len(tokens)
        return row, reused

    def stored(self, row: int) -> list[int]:
        keys = self._slots[0].keys
        assert keys is not None
        return [int(v) for v in keys[row, 0, : self.kv_len[row], 0]]


def assert_consistent(cache: Filled) -> None:
    for row in range(cache.n_rows):
        n = cache.kv_len[row]
        assert cache.stored(row) == cache.tokens[row, :n].tolist()


def test_a_group_mate_copies_the_common_prompt() -> None:
    cache = Filled()
    cache.open(count(0, 20))
    row, reused = cache.open(np.concatenate([count(0, 15), count(100, 5)]))
    assert (row, reused) == (1, 15)
    assert_consistent(cache)


def test_the_next_turn_takes_over_the_row_of_the_turn_that_it_extends() -> None:
    cache = Filled()
    row, _ = cache.open(count(0, 20))
    assert cache.release(row, retain=True) is None
    row, reused = cache.open(count(0, 30))
    assert reused == 20
    assert int((cache.kv_len > 0).sum()) == 1, "no second copy is kept"
    assert_consistent(cache)


def test_releasing_a_row_moves_the_last_one_into_its_place() -> None:
    cache = Filled()
    cache.open(count(0, 10))
    cache.open(count(50, 12))
    assert cache.release(0, retain=True) == 1
    assert cache.stored(0) == list(range(50, 62))
    assert cache.stored(1) == list(range(10))
    assert cache.n_active == 1
    assert_consistent(cache)


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = Filled(max_running=1, n_retained=2)
    for start in (0, 100, 200):
        row, _ = cache.open(count(start, 10))
        cache.release(row, retain=True)
    assert cache.longest_prefix(count(0, 10))[1] == 10, "three rows hold three prefixes"
    row, _ = cache.open(count(300, 10))
    assert [cache.longest_prefix(count(s, 10))[1] for s in (0, 100, 200)] == [0, 10, 10]
    assert_consistent(cache)


def test_a_partly_shared_prefix_survives_its_reuse() -> None:
    cache = Filled(max_running=1, n_retained=2)
    row, _ = cache.open(count(0, 20))
    cache.release(row, retain=True)
    row, reused = cache.open(np.concatenate([count(0, 10), count(70, 10)]))
    assert reused == 10
    cache.release(row, retain=True)
    assert cache.longest_prefix(count(0, 20))[1] == 20
    assert_consistent(cache)


def test_kv_of_replaced_weights_is_never_a_prefix() -> None:
    cache = Filled()
    cache.open(count(0, 20))
    row, _ = cache.open(count(50, 20))
    cache.release(row, retain=True)
    cache.mark_stale()
    assert cache.longest_prefix(count(50, 20))[1] == 0, "the retained row is dropped"
    assert cache.longest_prefix(count(0, 20))[1] == 0, "the running row goes on, but lends nothing"
    assert cache.stored(0) == list(range(20))
    cache.release(0, retain=True)
    assert cache.longest_prefix(count(0, 20))[1] == 0, "nor is it retained when it ends"
    row, reused = cache.open(count(0, 20))
    assert reused == 0
    assert cache.longest_prefix(count(0, 20))[1] == 20


def test_capacity_grows_and_keeps_what_is_stored() -> None:
    cache = Filled()
    cache.open(count(0, 20))
    before = cache.capacity
    cache.open(count(0, before + 50))
    assert cache.capacity >= before + 50
    assert_consistent(cache)


def test_a_request_waits_for_a_row_that_is_about_to_compute_its_prefix() -> None:
    cache = Filled()
    cache.acquire(count(0, 100), 99)
    assert cache.worth_waiting(count(0, 80))
    assert not cache.worth_waiting(count(500, 80))
    cache.kv_len[0] = 100
    assert not cache.worth_waiting(count(0, 80)), "it is there already"


def test_random_use_keeps_rows_and_tokens_together() -> None:
    rng = np.random.default_rng(0)
    cache = Filled(max_running=3, n_retained=4)
    for _ in range(400):
        if cache.n_active == 3 or (cache.n_active and rng.random() < 0.4):
            cache.release(int(rng.integers(cache.n_active)), retain=bool(rng.random() < 0.8))
        else:
            shared = count(1000 * int(rng.integers(3)), int(rng.integers(4, 40)))
            own = rng.integers(0, 9, int(rng.integers(1, 20))).astype(np.int32)
            cache.open(np.concatenate([shared, own]))
        if rng.random() < 0.02:
            cache.mark_stale()
        assert_consistent(cache)
