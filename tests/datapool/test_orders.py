"""The two orders underneath: a heap with movable keys, and readiness."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwell.datapool.core.heap import KeyedHeap
from stepwell.datapool.core.ready import ReadyOrder

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
    while heads := order.first(1):
        served += heads
        order.discard(heads[0])
    assert served == ["a", "b", "c"]


def test_nothing_is_left_of_a_discarded_group():
    order = ReadyOrder()
    for _ in range(19):
        order.reach("g")
    assert order.first(19) == ["g"]
    order.discard("g")
    assert order._entries == {}
    assert not any(order._queues.values())
    assert [order.count(n) for n in (1, 10, 19)] == [0, 0, 0]


class OrderMachine(RuleBasedStateMachine):
    """`ReadyOrder` against a list that is sorted anew for every answer."""

    def __init__(self):
        super().__init__()
        self.order = ReadyOrder()
        self.places: dict[str, list[list]] = {}  # uid -> [[key, sequence], …], one if due
        self.due: set[str] = set()
        self.held: set[str] = set()
        self.asked: set[int] = set()
        self.next = self.returned = 0

    @rule(uid=KEYS, key=st.integers(-2, 2))
    def make_due(self, uid, key):
        self.next += 1
        self.order.make_due(uid, key)
        self.held.discard(uid)
        self.due.add(uid)
        self.places[uid] = [[key, self.next]]

    @rule(uid=KEYS)
    def give_back(self, uid):
        self.returned -= 1
        self.order.give_back(uid)
        self.held.discard(uid)
        self.due.add(uid)
        self.places[uid] = [[-math.inf, self.returned]]

    @rule(uid=KEYS)
    def reach(self, uid):
        if uid not in self.due:
            self.next += 1
            self.order.reach(uid)
            places = self.places.setdefault(uid, [])
            places.append([places[0][0] if places else 0, self.next])

    @rule(n=st.integers(1, 4))
    def ask(self, n):
        """A consumer of a number that nobody has asked for before."""
        self.asked.add(n)

    @rule(uid=KEYS, key=st.integers(-2, 2))
    def rekey(self, uid, key):
        self.order.rekey(uid, key)
        for place in self.places.get(uid, ()):
            if place[0] != -math.inf:
                place[0] = key

    @rule(uid=KEYS)
    def hold(self, uid):
        if uid in self.places:
            self.order.hold(uid)
            self.held.add(uid)

    @rule(uid=KEYS)
    def release(self, uid):
        self.order.release(uid)
        self.held.discard(uid)

    @rule(uid=KEYS)
    def discard(self, uid):
        self.order.discard(uid)
        self.held.discard(uid)
        self.due.discard(uid)
        self.places.pop(uid, None)

    @invariant()
    def every_consumer_sees_the_same(self):
        for n in self.asked:
            expected = sorted(
                (*(places[0] if uid in self.due else places[n - 1]), uid)
                for uid, places in self.places.items()
                if uid not in self.held and (uid in self.due or len(places) >= n)
            )
            assert self.order.count(n) == len(expected)
            assert self.order.first(n, 3) == [place[-1] for place in expected[:3]]


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(stateful_step_count=30)
