"""The two orders underneath: a heap with movable keys, and readiness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from datapool.heap import KeyedHeap
from datapool.ready import ReadyOrder

KEYS = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.sampled_from(["set", "discard", "pop"]), KEYS, st.integers(0, 5))))
def test_a_keyed_heap_agrees_with_a_dict(operations):
    heap, model = KeyedHeap(), {}
    for ticket, (operation, key, value) in enumerate(operations):
        if operation == "set":
            heap.set(key, value)
            if model.get(key, (None,))[0] != value:
                model[key] = (value, ticket)
        elif operation == "discard":
            heap.discard(key)
            model.pop(key, None)
        else:
            due = [k for k, (v, _) in model.items() if v <= value]
            expected = min(due, key=model.__getitem__) if due else None
            assert heap.pop_until(value) == expected
            model.pop(expected, None)
        assert len(heap) == len(model)
        first = min(((v, t, k) for k, (v, t) in model.items()), default=None)
        assert heap.first() == (first and (first[0], first[2]))


def test_a_heap_does_not_keep_what_was_withdrawn():
    heap = KeyedHeap()
    heap.set("held", 0)
    for i in range(10_000):
        heap.set("moved", i)
        heap.set(str(i), i)
        heap.discard(str(i))
    assert len(heap._heap) < 100


def test_returned_groups_go_first_in_the_order_of_return():
    order = ReadyOrder()
    for uid in "abc":
        order.make_due(uid)
    for uid in "ab":
        order.discard(uid)
    for uid in "ba":
        order.give_back(uid)
    served = []
    while (uid := order.first(1)) is not None:
        served.append(uid)
        order.discard(uid)
    assert served == ["a", "b", "c"]


def test_nothing_is_left_of_a_discarded_group():
    order = ReadyOrder()
    for n in range(1, 20):
        order.reach("g", n)
    assert order.first(19) == "g"
    order.discard("g")
    assert order._reached == {}
    assert order._reached_count == {}
    assert [order.count(n) for n in (1, 10, 19)] == [0, 0, 0]
