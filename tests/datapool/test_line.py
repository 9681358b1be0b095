"""Frames over a Unix socket, without a pool; with one: `test_ray.py`."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
import uvloop

from stepwell.datapool.remote.line import LineServer, connect


class ForeignError(Exception):
    def __init__(self) -> None:
        super().__init__("no copy of me")
        self.lock = threading.Lock()


async def echo(value: Any) -> Any:
    return value


async def fail() -> None:
    raise ForeignError


@pytest.fixture
def server() -> LineServer:
    return LineServer({"echo": echo, "fail": fail})


def test_a_line_is_up_on_uvloop_which_gateways_and_actors_run_on(server: LineServer) -> None:
    async def ask() -> Any:
        connection = await connect(await server.open())
        return await connection.begin("echo", (1,))[1]

    assert uvloop.run(ask()) == 1


async def test_values_of_any_size_go_both_ways_in_order(server: LineServer) -> None:
    connection = await connect(await server.open())
    values = [b"x" * n for n in (0, 1, 70_000, 5_000_000)] + [{"a": [1, None]}]
    answers = [connection.begin("echo", (value,))[1] for value in values]
    assert await asyncio.gather(*answers) == values


async def test_opening_twice_at_once_is_one_socket(server: LineServer) -> None:
    first, second = await asyncio.gather(server.open(), server.open())
    assert first == second


async def test_an_error_that_cannot_be_pickled_is_told_in_words(server: LineServer) -> None:
    connection = await connect(await server.open())
    with pytest.raises(RuntimeError, match="ForeignError: no copy of me"):
        await connection.begin("fail", ())[1]
    assert await connection.begin("echo", (1,))[1] == 1


async def test_another_users_process_gets_no_line(
    server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await server.open()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    connection = await connect(name)
    await asyncio.sleep(0)  # a line that was refused is taken down in the next turn of the loop
    assert not connection.is_up
