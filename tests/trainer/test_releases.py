"""Versions are tried out and taken back, in a run with a real pool and everything slow replaced."""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from stepwell.backends.base import TrainingBackend
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import VersionNotKeptError
from stepwell.backends.weights import WeightStore
from stepwell.config.run import RunConfig
from stepwell.datapool import Step
from stepwell.trainer.guard import Sample, falls_below
from stepwell.trainer.memory import EngineMemory
from stepwell.trainer.progress import Progress
from stepwell.trainer.publication import EngineWeights
from stepwell.trainer.releases import Releases
from stepwell.trainer.rollback_file import Answer, RollBackFile, wait_for
from tests.trainer.small_run import (
    FakeEngine,
    RecordingBackend,
    SmallRun,
    local_pool,
    small_config,
    small_run,
)

GUARDED = ("publish.guard.n=16", "publish.guard.wait_s=20", "trainer.keep_weights=3")
BAD_AT = 4
"""Updates after which the weights are broken."""


def served(engine: FakeEngine) -> int:
    """Updates in the weights that the engine has loaded."""
    file = Path(engine.path) / "weights"
    return int(file.read_text()) if file.is_file() else 0


class BreakingBackend(RecordingBackend):
    """Its fourth update breaks the weights; without that one, nothing does."""

    def train_step(self, *args: Any) -> dict[str, float]:
        metrics = super().train_step(*args)
        if len(self.columns) == BAD_AT:
            self.updates = 1000
        return metrics


def earns(run: Callable[[], SmallRun]) -> Callable[[Any, int], float]:
    """1 or 0 of good weights, 0 of broken ones."""
    chance = random.Random(0)

    def reward(task: Any, index: int) -> float:
        return 0.0 if served(run().engine) >= 1000 else float(chance.random() < 0.9)

    return reward


async def trained(config: RunConfig, backend: RecordingBackend, steps: int) -> SmallRun:
    runs: list[SmallRun] = []
    async with small_run(config, backend=backend, reward=earns(lambda: runs[0])) as run:
        runs.append(run)
        await run.train(steps)
    return run


@pytest.mark.parametrize("mode", ["async", "sync", "one_step_off"])
async def test_broken_weights_are_rolled_back_by_their_rewards(mode: str, tmp_path: Path) -> None:
    larger = ("trainer.train_batch_size=8", "rollout.max_outstanding_groups=16")
    config = small_config(tmp_path, *GUARDED, *larger, f"async_training.mode={mode}")
    run = await trained(config, BreakingBackend(), 16)
    assert run.trainer.publisher.releases.rolled_back == 1
    (version, weights_of), *more = run.trainer.progress.rolled_back.items()
    assert not more
    assert weights_of < version - 1, "the numbers go on"
    assert run.engine.version == run.trainer.progress.version > version
    assert served(run.engine) < 1000, "and training went on from good weights"
    assert run.backend.updates < 1000
    loads = [int(call.split()[1]) for call in run.engine.calls if call.startswith("load")]
    assert loads == sorted(loads)


async def test_weights_that_are_no_worse_stay(tmp_path: Path) -> None:
    config = small_config(tmp_path, *GUARDED)
    run = await trained(config, RecordingBackend(), 12)
    assert run.trainer.publisher.releases.rolled_back == 0
    assert served(run.engine) == run.backend.updates == 12, "what was held up is published"


async def test_without_traffic_a_version_stays_and_the_next_is_published(tmp_path: Path) -> None:
    guarded = ("publish.guard.n=1000", "publish.guard.wait_s=0.05")
    config = small_config(tmp_path, *guarded)
    run = await trained(config, RecordingBackend(), 6)
    assert run.trainer.publisher.releases.unjudged > 0
    assert served(run.engine) == 6


async def asked_after(run: SmallRun, steps: int, to: int | None) -> Answer:
    """What the trainer answers while it waits for groups, after so many steps."""
    held, begun = asyncio.Event(), count()
    enough = steps * run.config.trainer.train_batch_size
    run.rollouts.hold = lambda task, channel: held if next(begun) >= enough else None
    await run.trained(steps)
    with RollBackFile(run.config.run.dir).asked(to) as answer:
        found = await asyncio.to_thread(wait_for, answer, lambda: True)
    run.rollouts.hold = lambda task, channel: None
    held.set()
    assert found is not None
    return found


async def test_a_roll_back_that_is_asked_for_is_served_at_once_and_trained_on(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=20")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(20))
        answer = await asked_after(run, 3, to=2)
        assert answer.error is None
        assert answer.version is not None
        assert answer.weights_of == served(run.engine) == 2 < answer.version - 1
        await training
        progress = run.trainer.progress
        assert run.backend.updates == 20 - (progress.published[answer.version] - 2)
        assert served(run.engine) == run.backend.updates
        stored = WeightStore(tmp_path / "weights", keep=20)
        assert stored.weights_of(answer.version) == 2
        assert not progress.is_good(3)
        assert progress.published[3] < progress.published[2], "older than what is served"


async def test_a_version_that_is_not_kept_is_refused_with_those_that_are(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=2")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(20))
        answer = await asked_after(run, 4, to=1)
        assert answer.error is not None
        assert "version 1 is not kept; kept are 0, " in answer.error
        assert "trainer.keep_weights=2" in answer.error
        await training
        assert run.backend.updates == 20, "and nothing else happens"


class Stubborn(RecordingBackend):
    """Takes no weights of before."""

    load_weights = TrainingBackend.load_weights


async def test_a_backend_that_cannot_load_weights_refuses_a_roll_back_and_trains_on(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=20")
    async with small_run(config, backend=Stubborn()) as run:
        training = asyncio.create_task(run.train(20))
        answer = await asked_after(run, 3, to=2)
        assert answer.error is not None
        assert "the training backend does not implement load_weights()" in answer.error
        await training
        assert served(run.engine) == run.backend.updates == 20, "and nothing else happens"


async def test_a_resumed_run_goes_on_from_a_roll_back_that_its_checkpoint_does_not_know(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=4", "trainer.checkpoint_every=2")
    async with small_run(config) as run:
        await run.train(4)
        store = WeightStore(tmp_path / "weights", keep=4)
        newest = run.engine.version
        store.commit(newest + 1, store.write_again(newest + 1, newest - 1))
    async with small_run(config) as again:
        assert await again.trainer.resume()
        assert again.backend.updates == 3, "of the version before the newest"
        await again.trainer.publisher.published()
        assert served(again.engine) == 3
        assert again.engine.version > newest


async def test_a_checkpoint_beside_a_roll_back_has_the_weights_that_are_served(
    tmp_path: Path,
) -> None:
    """The roll-back comes while the backend's state is taken."""

    class RolledBackMeanwhile(RecordingBackend):
        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            if run.trainer.publisher.releases.rolled_back == 0:
                asyncio.run_coroutine_threadsafe(
                    run.trainer.publisher.releases.roll_back(1, "for the test"), loop
                ).result()
            return state

    loop = asyncio.get_running_loop()
    config = small_config(tmp_path, "trainer.keep_weights=9", "trainer.checkpoint_every=4")
    async with small_run(config, backend=RolledBackMeanwhile()) as run:
        await run.train(4)
        assert served(run.engine) == 1
        path = run.trainer.checkpoints.find("auto")
        assert path is not None
        state = run.trainer.checkpoints.load(path)
    assert state["progress"].rolled_back
    assert state["backend"]["updates"] == 1


async def test_what_a_killed_command_had_asked_for_is_not_done(tmp_path: Path) -> None:
    file = RollBackFile(tmp_path)
    with file.asked(3):
        left = (tmp_path / "rollback.json").read_text()
        with pytest.raises(BlockingIOError), RollBackFile(tmp_path).asked(2):
            pass
        request = file.taken()
        assert request is not None
        assert request.to == 3
    (tmp_path / "rollback.json").write_text(left)
    assert file.taken() is None
    assert not (tmp_path / "rollback.json").exists()


# -- canaries --------------------------------------------------------------------------------------


class Served:
    """Two engines that a `Releases` publishes to, and a pool that says what their versions earn."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder, "publish.guard.n=16", "publish.guard.wait_s=20")
        self.folder = folder
        self.pool = local_pool(config)
        self.engines = [FakeEngine(), FakeEngine()]
        for name, engine in zip("ab", self.engines, strict=True):
            engine.url = f"http://{name}"
        (folder / "base").mkdir(exist_ok=True)
        (folder / "base" / "weights").write_text("0")
        self.store = WeightStore(folder / "weights", keep=4, base=folder / "base")
        engines = cast("list[EngineClient]", self.engines)
        self.progress = Progress()
        self.said: list[str] = []
        self.releases = Releases(
            EngineWeights(engines, self.store, EngineMemory(engines, lends=False)),
            self.pool,
            config.publish,
            self.progress,
            folder=folder,
            mode="retract",
            updates_per_sync=1,
            tries_out=True,
            can_restore=True,
            overdue=self._nothing,
            tell=self.said.append,
        )

    async def _nothing(self) -> None:
        return

    async def give(self) -> bool:
        async def write(version: int) -> tuple[Path, int]:
            def save(folder: Path) -> None:
                folder.mkdir()
                (folder / "weights").write_text(str(version))

            return self.store.write(version, save), version

        return await self.releases.give(write)

    async def earn(self, version: int, *rewards: float) -> None:
        for reward in rewards:
            uid = uuid.uuid4().hex
            step = Step(
                prompt_ids=[1],
                response_ids=[2],
                trajectory_uid=uid,
                prompt_uid=uid,
                policy_version=version,
            )
            await self.pool.submit_step(step)
            await self.pool.complete_trajectory(uid, reward)

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self.engines]


async def test_a_canary_that_earns_as_much_is_published_to_all(tmp_path: Path) -> None:
    run = Served(tmp_path)
    async with run.releases.running():
        await run.earn(0, *[1, 1, 1, 0] * 8)
        await run.releases.judged()
        assert await run.give()
        await run.engines[1].serves(1)
        assert run.names == ["0", "1-canary"]
        current = run.store.current()
        assert current is not None
        assert current.version == 0
        assert not await run.give(), "nothing is published beside a canary"
        await run.earn(1, *[1, 1, 1, 0] * 8)
        await run.releases.judged()
        assert run.names == ["1", "1"]
        current = run.store.current()
        assert current is not None
        assert current.version == 1


async def test_a_canary_that_earns_less_than_the_others_meanwhile_is_taken_back(
    tmp_path: Path,
) -> None:
    run = Served(tmp_path)
    async with run.releases.running():
        await run.earn(0, *[1, 1, 1, 0] * 8)
        await run.releases.judged()
        await run.give()
        await run.earn(0, *[1, 1, 1, 0] * 8)
        await run.earn(1, *[0] * 16)
        await run.releases.judged()
        assert run.names == ["2", "2"]
        assert [served(engine) for engine in run.engines] == [0, 0]
        assert run.releases.to_restore == run.store.path(2)
        assert run.progress.rolled_back == {2: 0}
        assert len(run.said) == 1
        assert "version 1 is rolled back, version 2 has the weights of 0" in run.said[0]


async def test_a_trainer_that_dies_beside_a_canary_leaves_it_to_the_next(tmp_path: Path) -> None:
    run = Served(tmp_path)
    async with run.releases.running():
        await run.earn(0, *[1, 1, 1, 0] * 8)
        await run.releases.judged()
        await run.give()
        await run.engines[1].serves(1)
        assert run.names == ["0", "1-canary"]
        left = [(e.name, e.path) for e in run.engines]  # a kill leaves this and the store
        files = shutil.copytree(tmp_path / "weights", tmp_path / "copy")
    shutil.rmtree(tmp_path / "weights")
    shutil.copytree(files, tmp_path / "weights")
    config = small_config(tmp_path)
    async with small_run(config) as again:
        again.engine.name, again.engine.path = left[1]
        assert not await again.trainer.resume()
        await again.trainer.publisher.published()
        assert again.engine.name == "2", "a number that nobody has seen, committed"
        current = WeightStore(tmp_path / "weights").current()
        assert current is not None
        assert current.version == 2


# -- the store -------------------------------------------------------------------------------------


def test_a_version_is_written_again_with_the_same_bytes_and_knows_whose_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "w").write_text("0")
    store = WeightStore(tmp_path / "weights", keep=3, base=tmp_path / "base")

    def save(version: int) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            folder.mkdir()
            (folder / "w").write_text(str(version))

        return write

    for version in (1, 2):
        store.commit(version, store.write(version, save(version)))
    assert store.find(None, 2) == 1
    store.commit(3, store.write_again(3, 1))
    assert (store.path(3) / "w").read_text() == "1"
    assert store.weights_of(3) == 1
    assert store.find(None, 3) == 0, "the one before is that before 1"
    store.commit(4, store.write_again(4, 3))
    assert store.weights_of(4) == 1
    assert list(store.kept()) == [0, 2, 3, 4]
    with pytest.raises(VersionNotKeptError, match=r"version 1 is not kept; kept are 0, 2, 3, 4"):
        store.find(1, 4)
    store.commit(5, store.write_again(5, 0))
    assert (store.path(5) / "w").read_text() == "0"
    with pytest.raises(VersionNotKeptError, match="a version before 5 is not kept"):
        store.find(None, 5)


# -- the test --------------------------------------------------------------------------------------


def singles(*rewards: float) -> Sample:
    return Sample.of([[r] for r in rewards])


def test_a_lower_mean_counts_only_beyond_its_error() -> None:
    old = singles(*[1, 1, 1, 1, 0] * 12)
    assert not falls_below(singles(*[1, 1, 1, 0, 0] * 12), old, z=3)
    assert falls_below(singles(*[1, 0, 0] * 20), old, z=3)
    assert not falls_below(old, singles(*[1, 0, 0] * 20), z=3), "better is not worse"
    assert falls_below(singles(*[0.5] * 8), singles(*[0.6] * 8), z=3), "without error all counts"


def test_rollouts_of_one_prompt_are_not_taken_for_independent() -> None:
    """Two prompts that succeed and two that fail tell as much as four rewards do."""
    four = Sample.of([[1.0] * 16, [1.0] * 16, [0.0] * 16, [0.0] * 16])
    assert four.n == 64
    assert four.error == pytest.approx(singles(1, 1, 0, 0).error)
    assert not falls_below(four, singles(*[1, 1, 1, 0] * 16), z=3)
    assert Sample.of([[1.0] * 64]).error == float("inf"), "one prompt tells nothing of others"
    assert Sample.of([]).n == 0
