"""A body's content is bounded before objects are made of it: no request takes the event loop from
the others, whatever it is made of."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gateway.hostile import CHAT, COMPLETIONS, HOSTILE, USER, M, function, hostile_body
from stepwell.gateway import bodies


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_is_refused_in_few_words_and_nothing_is_sampled(
    worlds: Any, name: str
) -> None:
    world = await worlds(tool_parser="hermes")
    path, body = hostile_body(name)
    assert len(body) <= world.gateway.config.max_body_bytes
    kind = {"content-type": "application/json"}
    began = time.thread_time()
    async with (
        aiohttp.ClientSession() as http,
        http.post(world.url + path, data=body, headers=kind) as answer,
    ):
        text = await answer.text()
        assert 400 <= answer.status < 500, text[:1000]
    assert len(text) < 1000
    assert not world.engine.requests
    # Seconds before; the client and its 30 MB are in this thread, too.
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize(
    ("path", "sign", "refusal"),
    [
        (CHAT, b"", "exceeds 12582912 bytes (the most of text alone)"),
        (COMPLETIONS, b"", "exceeds 12582912 bytes (the most of text alone)"),
        ("/init_trajectory", b"", "exceeds 12582912 bytes (the most of text alone)"),
        ("/submit_steps", "\U0001f600".encode(), "text outside ASCII, and may have 12582912"),
        ("/submit_steps", b"\\ud83d\\ude00", "text outside ASCII, and may have 12582912"),
        ("/submit_steps", b"", None),
    ],
)
async def test_a_long_text_is_refused_before_it_is_parsed(
    worlds: Any, path: str, sign: bytes, refusal: str | None
) -> None:
    """Steps may be longer, of ids and log-probs."""
    world = await worlds()
    body = b'{"messages": [{"role": "user", "content": "%s%s"}]}' % (sign, b"a " * 8 * M)
    kind = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(world.url + path, data=body, headers=kind) as answer,
    ):
        text = await answer.text()
    assert answer.status == (413 if refusal else 400), text
    assert (refusal or "messages") in text
    assert not world.engine.requests


async def test_a_long_tool_description_is_served_where_it_fits(worlds: Any) -> None:
    world = await worlds(context_length=8 * M)
    tool = function(description="word " * 600_000, parameters={"type": "object", "properties": {}})
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": USER, "tools": [tool]}
        async with http.post(world.url + CHAT, json=body) as answer:
            assert answer.status == 200, await answer.text()
    assert len(world.engine.requests[0]["input_ids"]) > 600_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\,[{}]:\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[')), inner),
)


def count(value: Any) -> tuple[int, int, int]:
    """Strings, containers and commas of a value, by the book."""
    if isinstance(value, str):
        return 1, 0, 0
    if isinstance(value, dict):
        members: Any = itertools.chain(value, value.values())
    elif isinstance(value, list):
        members = value
    else:
        return 0, 0, 0
    strings = containers = commas = 0
    for n, m, k in map(count, members):
        strings, containers, commas = strings + n, containers + m, commas + k
    return strings, containers + 1, commas + max(len(value) - 1, 0)


@given(values, st.integers(1, 9))
def test_the_scan_counts_what_stands_in_no_string_wherever_the_pieces_end(
    value: Any, size: int
) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BIG", size)
        assert tuple(bodies.holdings(body, bodies.Holdings(-1, -1, -1))) == count(value)
