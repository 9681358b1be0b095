"""Bytes on the wire are those that were recorded (`golden.py` says how)."""

from __future__ import annotations

import pytest

from tests.gateway.golden import load, play, sessions


@pytest.mark.parametrize(("file", "name"), sessions())
async def test_answers_are_byte_for_byte_those_recorded(file: str, name: str) -> None:
    session = load(file)[name]
    for exchange, answer in zip(session["exchanges"], await play(session), strict=True):
        assert {"request": exchange["request"], **answer} == {
            "request": exchange["request"],
            **exchange["answer"],
        }
