"""An engine that is down is waited for; one that refuses is not asked for ever."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.backends.errors import WeightUpdateError
from stepwell.backends.weights import Publication, publish, transaction
from stepwell.backends.weights.transaction import REFUSALS


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "RETRY_S", 0.0)


async def attempts(
    monkeypatch: pytest.MonkeyPatch, failures: list[int | None], patience_s: float
) -> int:
    """Number of tries of a publication whose first tries leave the engine serving `failures`."""
    tries = 0

    async def run(_: Any) -> Publication:
        nonlocal tries
        tries += 1
        if tries <= len(failures):
            raise WeightUpdateError("no", serving={"http://engine": failures[tries - 1]})
        return Publication(7, 0.1)

    monkeypatch.setattr(transaction._Transaction, "run", run)
    engine: Any = object()
    done = await publish([engine], "v7", 7, "drain", patience_s=patience_s)
    assert done.version == 7
    return tries


async def test_a_publication_waits_for_an_engine_that_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await attempts(monkeypatch, [None] * 20, 60) == 21


async def test_an_engine_that_came_back_within_a_publication_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await attempts(monkeypatch, [6] * (REFUSALS - 1), 60) == REFUSALS


async def test_engines_that_answer_and_refuse_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightUpdateError):
        await attempts(monkeypatch, [6] * REFUSALS, 60)


async def test_an_engine_that_never_comes_back_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightUpdateError):
        await attempts(monkeypatch, [None] * 3, 0)
