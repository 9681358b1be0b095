"""An engine that is down is waited for; one that refuses is not asked for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineError, WeightUpdateError
from stepwell.backends.weights import Publication, WeightStore
from stepwell.trainer import publication
from stepwell.trainer.publication import REFUSALS, publish_patiently, serving


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "RETRY_S", 0.0)


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
    done = await publish_patiently(
        [],
        folder,
        7,
        "drain",
        store=WeightStore(folder),
        transport="disk",
        patience_s=patience_s,
    )
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


async def test_a_resume_waits_for_engines_too() -> None:
    engines = cast(list[EngineClient], [Engine(0), Engine(3)])
    assert await serving(engines, 60) == [4, 4]
    with pytest.raises(EngineError):
        await serving(cast(list[EngineClient], [Engine(3)]), 0)
