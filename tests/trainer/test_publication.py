"""An engine that is down is waited for; one that refuses is not asked for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.errors import EngineError, WeightUpdateError
from stepwell.backends.weights import Publication, WeightStore
from stepwell.trainer import publication
from stepwell.trainer.memory import EngineMemory
from stepwell.trainer.publication import REFUSALS, EngineWeights


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "RETRY_S", 0.0)


def weights_of(engines: list[Any], folder: Path, patience_s: float) -> EngineWeights:
    memory = EngineMemory(engines, lends=False)
    return EngineWeights(engines, WeightStore(folder), memory, patience_s=patience_s)


async def attempts(
    monkeypatch: pytest.MonkeyPatch, folder: Path, failures: list[int | None], patience_s: float
) -> int:
    """How often it was tried, if the first tries leave the engine serving `failures`."""
    tries = 0

    async def publish(*_: Any, **__: Any) -> Publication:
        nonlocal tries
        tries += 1
        if tries <= len(failures):
            raise WeightUpdateError("no", serving={"http://engine": failures[tries - 1]})
        return Publication(7, 0.1)

    monkeypatch.setattr(publication, "publish", publish)
    weights = weights_of([object()], folder, patience_s)  # `publish` alone would ask it
    done = await weights.publish(folder, 7, "drain")
    assert done.version == 7
    return tries


async def test_a_publication_waits_for_an_engine_that_restarts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await attempts(monkeypatch, tmp_path, [None] * 20, 60) == 21


async def test_an_engine_that_came_back_within_a_publication_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await attempts(monkeypatch, tmp_path, [6] * (REFUSALS - 1), 60) == REFUSALS


async def test_engines_that_answer_and_refuse_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(WeightUpdateError):
        await attempts(monkeypatch, tmp_path, [6] * REFUSALS, 60)


async def test_an_engine_that_never_comes_back_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(WeightUpdateError):
        await attempts(monkeypatch, tmp_path, [None] * 3, 0)


class Engine:
    def __init__(self, down: int) -> None:
        self._down = down

    async def weight_version(self) -> int:
        self._down -= 1
        if self._down >= 0:
            raise EngineError("connection refused")
        return 4


async def test_a_resume_waits_for_engines_too(tmp_path: Path) -> None:
    assert await weights_of([Engine(0), Engine(3)], tmp_path, 60).serving() == [4, 4]
    with pytest.raises(EngineError):
        await weights_of([Engine(3)], tmp_path, 0).serving()
