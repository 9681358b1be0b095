"""Calls of one handle begin in the order they were made."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepwell.datapool.remote.turns as turns_module
from stepwell.datapool.remote.turns import Numbering, Turns


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def start(turns, began, order):
    async def call():
        await turns.take(order)
        began.append(order)

    return asyncio.create_task(call())


@given(st.permutations(range(8)))
def test_calls_begin_by_number_however_they_arrive(arrivals):
    async def run():
        turns, began = Turns(), []
        for number in arrivals:
            start(turns, began, ("me", number))
            await settle()
        assert [number for _, number in began] == list(range(8))

    asyncio.run(run())


async def test_callers_do_not_wait_for_each_other():
    turns, began = Turns(), []
    stuck = start(turns, began, ("a", 1))
    start(turns, began, ("b", 0))
    start(turns, began, None)
    await settle()
    assert began == [("b", 0), None]
    stuck.cancel()


async def test_a_number_that_never_arrives_is_passed_over(monkeypatch):
    monkeypatch.setattr(turns_module, "GRACE_S", 0.02)
    turns, began = Turns(), []
    await asyncio.gather(*(start(turns, began, ("me", n)) for n in (4, 3, 5)))
    assert began == [("me", 3), ("me", 4), ("me", 5)]
    await start(turns, began, ("me", 2))
    assert began[-1] == ("me", 2), "when it comes after all, it is not refused"


async def test_a_restarted_actor_does_not_wait_for_what_its_predecessor_got():
    turns, began = Turns(resumed=True), []
    await start(turns, began, ("me", 17))
    await start(turns, began, ("me", 18))
    assert began == [("me", 17), ("me", 18)]


async def test_a_call_cancelled_in_line_does_not_hold_up_the_next():
    turns, began = Turns(), []
    first, second = start(turns, began, ("me", 1)), start(turns, began, ("me", 2))
    await settle()
    first.cancel()
    await settle()
    assert not second.done()
    start(turns, began, ("me", 0))
    await settle()
    assert second.done()
    assert began == [("me", 0), ("me", 2)]


def test_a_call_that_could_not_be_sent_uses_up_no_number():
    sent = []

    def send(args, kwargs):
        if "bad" in kwargs:
            raise TypeError("cannot pickle")
        sent.append(kwargs["order"][0][1])

    call = Numbering()(send)
    call([], {})
    with pytest.raises(TypeError):
        call([], {"bad": 1})
    call([], {})
    assert sent == [0, 1]


def test_a_copied_handle_is_another_caller():
    orders = []
    numbering = Numbering()
    both = pickle.loads(pickle.dumps({"a": numbering, "b": numbering}))
    assert both["a"] is both["b"], "the methods of one handle share their numbers"
    for n in (numbering, both["a"]):
        n(lambda args, kwargs: orders.append(kwargs["order"][0]))([], {})
    assert orders[0][0] != orders[1][0]
    assert [number for _, number in orders] == [0, 0]
