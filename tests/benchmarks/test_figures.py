"""Benches say that they measured nothing, where they did not; none holds its bound by that."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from benchmarks import catalogue, lag
from benchmarks.idle import shares_of
from benchmarks.ui import _looking
from stepwell.trainer.errors import ConfigError
from tests.helpers import serving_posts


async def test_a_dashboard_that_nobody_could_look_at_ends_the_bench() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    async with serving_posts("/another/path", answer) as origin:
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            async with _looking("open", origin):
                pass


def test_a_part_that_is_known_by_another_name_is_not_taken_for_an_idle_one() -> None:
    seen = {"pool": 1.0, "gateway": 2.0, "trainer": 3.0, "ray": 9.0}
    assert shares_of(seen, {**seen, "pool": 1.6}, 60.0)["pool"] == pytest.approx(0.01)
    for name in ("pool", "gateway", "trainer"):
        with pytest.raises(RuntimeError, match=f"no process is known as {name}"):
            shares_of(seen, {kind: s for kind, s in seen.items() if kind != name}, 60.0)


async def test_a_catalogue_of_another_number_of_trajectories_is_not_measured(
    tmp_path: Path,
) -> None:
    assert (await catalogue.run(trajectories=40, folder=tmp_path)).figures["trajectories"] == 40
    with pytest.raises(ConfigError, match="has 40 trajectories, not 50"):
        await catalogue.run(trajectories=50, folder=tmp_path)


async def test_the_table_of_lags_is_of_runs_of_one_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"lag": 8, "method": "none", "seed": 0, "rewards": [0.5] * 9}
    rows = [row | {"steps": 40, "score": 0.9}, row | {"steps": 3, "score": 0.1}]
    (tmp_path / "lag.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    monkeypatch.setattr(lag, "RESULTS", tmp_path / "lag.jsonl")
    (table,) = (await lag.run(report=True)).figures.values()
    (told,) = [each for each in table if each["method"] == "none"]
    assert told["lag 8"].startswith("0.900 (lowest 0.900")
