"""The two orders underneath: by a number that can be moved, and readiness."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwell.datapool.core.orders import KeyedOrder, ReadyQueue

KEYS = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.sampled_from(["set", "discard", "pop"]), KEYS, st.integers(0, 5))))
def test_a_keyed_order_agrees_with_a_dict(operations):
    order, model = KeyedOrder(), {}
    for ticket, (operation, key, value) in enumerate(operations):
        if operation == "set":
            order.set(key, value)
            if model.get(key, (None,))[0] != value:
                model[key] = (value, ticket)
        elif operation == "discard":
            order.discard(key)
            model.pop(key, None)
        else:
            due = [k for k, (v, _) in model.items() if v <= value]
            expected = min(due, key=model.__getitem__) if due else None
            assert order.pop_until(value) == expected
            model.pop(expected, None)
        assert len(order) == len(model)
        first = min(((v, t, k) for k, (v, t) in model.items()), default=None)
        assert order.first() == (first and (first[0], first[2]))


def test_nothing_is_left_of_what_was_withdrawn():
    order = KeyedOrder()
    order.set("held", 0)
    for i in range(1000):
        order.set("moved", i)
        order.set(str(i), i)
        order.discard(str(i))
    assert len(order._order) == len(order) == 2


def test_returned_groups_go_first_in_the_order_of_return():
    queue = ReadyQueue()
    for uid in "abc":
        queue.make_due(uid, 1)
    for uid in "ab":
        queue.discard(uid)
    for uid in "ba":
        queue.give_back(uid)
    served = []
    while heads := queue.first(1):
        served += heads
        queue.discard(heads[0])
    assert served == ["a", "b", "c"]


def test_nothing_is_left_of_a_discarded_group():
    queue = ReadyQueue()
    queue.reach("g", 19)
    assert queue.first(19) == ["g"]
    queue.discard("g")
    assert not queue._entries
    assert not any(queue._queues.values())
    assert [queue.count(n) for n in (1, 10, 19)] == [0, 0, 0]


class QueueMachine(RuleBasedStateMachine):
    """`ReadyQueue` against a list that is sorted anew for every answer."""

    def __init__(self):
        super().__init__()
        self.queue = ReadyQueue()
        self.places: dict[str, list[list]] = {}  # uid -> [[key, sequence], …], one if due
        self.due: set[str] = set()
        self.held: set[str] = set()
        self.asked: set[int] = set()
        self.next = self.returned = 0

    @rule(uid=KEYS, n=st.integers(1, 3))
    def make_due(self, uid, n):
        self.queue.make_due(uid, n)
        if uid in self.due:
            return
        places = self.places.get(uid, [])
        if len(places) >= n:
            self.places[uid] = [places[n - 1]]
        else:
            self.next += 1
            self.places[uid] = [[0, self.next]]
        self.held.discard(uid)
        self.due.add(uid)

    @rule(uid=KEYS)
    def give_back(self, uid):
        self.returned -= 1
        self.queue.give_back(uid)
        self.held.discard(uid)
        self.due.add(uid)
        self.places[uid] = [[-math.inf, self.returned]]

    @rule(uid=KEYS, n=st.integers(0, 4))
    def reach(self, uid, n):
        if uid in self.due:
            return
        self.queue.reach(uid, n)
        places = self.places.setdefault(uid, [])
        del places[n:]
        while len(places) < n:
            self.next += 1
            places.append([places[0][0] if places else 0, self.next])
        if not places:
            self.forget(uid)

    @rule(n=st.integers(1, 4))
    def ask(self, n):
        """A consumer of a number that nobody has asked for before."""
        self.asked.add(n)

    @rule(uid=KEYS, key=st.integers(-2, 2), is_held=st.booleans())
    def judged(self, uid, key, is_held):
        self.queue.judged(uid, key, is_held)
        if uid not in self.places:
            return
        (self.held.add if is_held else self.held.discard)(uid)
        for place in self.places[uid]:
            if place[0] != -math.inf and not is_held:
                place[0] = key

    @rule(uid=KEYS)
    def discard(self, uid):
        self.queue.discard(uid)
        self.forget(uid)

    def forget(self, uid):
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
            assert self.queue.count(n) == len(expected)
            assert self.queue.first(n, 3) == [place[-1] for place in expected[:3]]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=30)
