"""The two orders underneath: by a number that can be moved, and readiness."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwell.datapool.core.orders import KeyedOrder, ReadyOrder
from stepwell.datapool.core.records import GroupRecord

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


def groups_of(*uids):
    return {uid: GroupRecord(uid, 0.0, number) for number, uid in enumerate(uids)}


def test_returned_groups_go_first_in_the_order_of_return():
    groups = groups_of(*"abc")
    order = ReadyOrder(groups)
    for group in groups.values():
        order.make_due(group)
    for uid in "ab":
        order.discard(groups[uid])
    for uid in "ba":
        order.give_back(groups[uid])
    served = []
    while heads := order.first(1):
        served += heads
        order.discard(groups[heads[0]])
    assert served == ["a", "b", "c"]


def test_nothing_is_left_of_a_discarded_group():
    groups = groups_of("g")
    order = ReadyOrder(groups)
    for _ in range(19):
        order.reach(groups["g"])
    assert order.first(19) == ["g"]
    order.discard(groups["g"])
    assert not any(order._queues.values())
    assert [order.count(n) for n in (1, 10, 19)] == [0, 0, 0]


class OrderMachine(RuleBasedStateMachine):
    """`ReadyOrder` against a list that is sorted anew for every answer."""

    def __init__(self):
        super().__init__()
        self.groups = groups_of(*"abcdef")
        self.order = ReadyOrder(self.groups)
        self.places: dict[str, list[list]] = {}  # uid -> [[key, sequence], …], one if due
        self.due: set[str] = set()
        self.held: set[str] = set()
        self.asked: set[int] = set()
        self.next = self.returned = 0

    @rule(uid=KEYS)
    def make_due(self, uid):
        self.next += 1
        self.order.make_due(self.groups[uid])
        self.held.discard(uid)
        self.due.add(uid)
        self.places[uid] = [[0, self.next]]

    @rule(uid=KEYS)
    def give_back(self, uid):
        self.returned -= 1
        self.order.give_back(self.groups[uid])
        self.held.discard(uid)
        self.due.add(uid)
        self.places[uid] = [[-math.inf, self.returned]]

    @rule(uid=KEYS)
    def reach(self, uid):
        if uid not in self.due:
            self.next += 1
            self.order.reach(self.groups[uid])
            places = self.places.setdefault(uid, [])
            places.append([places[0][0] if places else 0, self.next])

    @rule(n=st.integers(1, 4))
    def ask(self, n):
        """A consumer of a number that nobody has asked for before."""
        self.asked.add(n)

    @rule(uid=KEYS, key=st.integers(-2, 2))
    def rekey(self, uid, key):
        self.order.rekey(self.groups[uid], key)
        for place in self.places.get(uid, ()):
            if place[0] != -math.inf:
                place[0] = key

    @rule(uid=KEYS)
    def hold(self, uid):
        if uid in self.places:
            self.order.hold(self.groups[uid])
            self.held.add(uid)

    @rule(uid=KEYS)
    def release(self, uid):
        self.order.release(self.groups[uid])
        self.held.discard(uid)

    @rule(uid=KEYS)
    def discard(self, uid):
        self.order.discard(self.groups[uid])
        self.groups[uid].due = False  # as that of a group that begins
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
