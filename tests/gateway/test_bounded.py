"""What a gateway remembers has a bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway.bounded import Bounded


def test_what_was_set_or_read_longest_ago_is_forgotten() -> None:
    memory: Bounded[str, str] = Bounded(10, len)
    memory["a"], memory["b"] = "12345", "12345"
    assert memory.get("a") == "12345"
    memory["c"] = "12345"
    assert list(memory) == ["a", "c"]


def test_a_value_that_is_too_large_alone_is_not_kept_and_displaces_no_other() -> None:
    memory: Bounded[str, str] = Bounded(10, len)
    memory["a"] = memory["b"] = "12345"
    memory["b"] = "12345678901"
    assert dict(memory) == {"a": "12345"}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans())))
def test_the_bound_holds_and_the_total_is_that_of_what_is_kept(
    changes: list[tuple[int, int, bool]],
) -> None:
    memory: Bounded[int, str] = Bounded(20, len)
    for key, size, is_set in changes:
        if is_set:
            memory[key] = "x" * size
            assert memory[key] == "x" * size
        else:
            memory.pop(key, None)
            assert key not in memory
        assert memory.total == sum(map(len, memory.values())) <= 20
