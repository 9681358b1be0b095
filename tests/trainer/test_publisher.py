"""Versions are tried out and taken back, in a run with a real pool and everything slow replaced."""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from stepwell.backends.base import TrainingBackend
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import (
    EngineError,
    EngineRequestError,
    EngineUnavailableError,
    UnsupportedByBackendError,
    VersionNotKeptError,
    WeightUpdateError,
)
from stepwell.backends.weights import StoreLock, WeightStore
from stepwell.backends.weights.transports import Disk
from stepwell.config.run import RunConfig
from stepwell.datapool import Step
from stepwell.run import train
from stepwell.run.folder import TrainerLock
from stepwell.run.train import let_publish
from stepwell.run.trainer import build_updater
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.publish.guard import Sample, falls_below
from stepwell.trainer.publish.publisher import Publisher
from stepwell.trainer.publish.rollback import roll_back
from stepwell.trainer.threads import ComputeThread
from tests.builders import until
from tests.engines import FakeEngine
from tests.trainer.small_run import (
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
    assert run.trainer.publisher._rolled_back == 1
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
    assert run.trainer.publisher._rolled_back == 0
    assert served(run.engine) == run.backend.updates == 12, "what was held up is published"


async def test_without_traffic_a_version_stays_and_the_next_is_published(tmp_path: Path) -> None:
    guarded = ("publish.guard.n=1000", "publish.guard.wait_s=0.05")
    config = small_config(tmp_path, *guarded)
    run = await trained(config, RecordingBackend(), 6)
    assert run.trainer.publisher._unjudged > 0
    assert served(run.engine) == 6


async def command(run: SmallRun, to: int | None) -> int:
    """Roll back as `stepwell rollback` does beside the trainer, in a process of its own."""
    config = run.config
    store = WeightStore(
        config.run.dir / "weights", keep=config.trainer.keep_weights, base=config.model.path
    )
    engines = cast("list[EngineClient]", [run.engine])
    return await roll_back(engines, store, run.pool, to, transport=Disk(), trains=True)


@asynccontextmanager
async def waiting_for_groups(run: SmallRun, steps: int) -> AsyncIterator[None]:
    """The trainer has taken so many steps, and has no more groups inside the block."""
    held, begun = asyncio.Event(), count()
    enough = steps * run.config.trainer.train_batch_size
    run.rollouts.hold = lambda task, channel: held if next(begun) >= enough else None
    await run.trained(steps)
    await run.trainer.publisher.wait_published()
    try:
        yield
    finally:
        run.rollouts.hold = lambda task, channel: None
        held.set()


async def test_steps_of_a_version_that_a_command_served_are_trained_on_its_weights(
    tmp_path: Path,
) -> None:
    """The batch that the trainer waits for has steps of a version that it did not publish."""
    config = small_config(tmp_path, "trainer.keep_weights=20")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(20))
        async with waiting_for_groups(run, 3):
            version = await command(run, to=2)
            assert served(run.engine) == 2 < version - 1
        await training
        progress = run.trainer.progress
        assert [version] in run.versions
        assert run.backend.updates == 20 - (progress.published[version] - 2)
        assert served(run.engine) == run.backend.updates
        stored = WeightStore(tmp_path / "weights", keep=20)
        assert stored.weights_of(version) == 2
        assert not progress.is_good(3)
        assert progress.published[3] < progress.published[2], "older than what is served"
        assert run.records[-1]["publish/rolled_back"] == 1


async def test_without_a_number_a_command_serves_the_version_before(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=20")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(6))
        async with waiting_for_groups(run, 3):
            assert await command(run, None) == 4
            assert served(run.engine) == 2
            assert await command(run, None) == 5
            assert served(run.engine) == 1
        await training
        assert run.trainer.progress.rolled_back == {5: 1}
        assert served(run.engine) == run.backend.updates == 1 + 3


async def test_a_version_that_is_not_kept_is_refused_with_those_that_are(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=2")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(20))
        async with waiting_for_groups(run, 4):
            with pytest.raises(VersionNotKeptError) as e:
                await command(run, to=1)
        assert "version 1 is not kept; kept are 0, " in str(e.value)
        assert "trainer.keep_weights=2" in str(e.value)
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
        await run.trainer.resume()
        training = asyncio.create_task(run.train(20))
        async with waiting_for_groups(run, 3):
            with pytest.raises(UnsupportedByBackendError, match=r"not implement load_weights\(\)"):
                await command(run, to=2)
        await training
        assert served(run.engine) == run.backend.updates == 20, "and nothing else happens"
    async with small_run(config) as willing:
        await willing.trainer.resume()
        assert WeightStore(tmp_path / "weights").why_refused() is None


async def test_a_resumed_run_goes_on_from_a_roll_back_that_its_checkpoint_does_not_know(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=4", "trainer.checkpoint_every=2")
    async with small_run(config) as run:
        await run.train(4)
        newest = run.engine.version
        assert await command(run, newest - 1) == newest + 1
    async with small_run(config) as again:
        assert await again.trainer.resume()
        assert again.backend.updates == 3, "of the version before the newest"
        await again.trainer.publisher.wait_published()
        assert served(again.engine) == 3
        assert again.engine.version > newest + 1
    async with small_run(config) as killed:  # before its first checkpoint: nothing was trained
        assert await killed.trainer.resume()
        assert killed.backend.updates == 3, "what was taken back does not come back"


async def test_a_roll_back_that_no_engine_took_takes_nothing_back(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=10")
    async with small_run(config) as run:
        await run.train(4)
        newest = run.engine.version
        run.engine.fails[f"load {newest + 1}"] = EngineRequestError("no memory")
        with pytest.raises(WeightUpdateError, match="no memory"):
            await command(run, None)
        await run.train(5)
        assert served(run.engine) == 5
        assert run.engine.version == newest + 2, "no number has two meanings"
        await command(run, None)
        assert served(run.engine) == 4, "which was served before"


class FullDisk(RecordingBackend):
    """Has no room for another checkpoint once it was told so."""

    is_full = False

    def save_state(self, folder: Path) -> dict[str, Any]:
        if self.is_full:
            raise OSError("no space left")
        return super().save_state(folder)


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_roll_back_is_served_until_a_checkpoint_holds_it(tmp_path: Path, mode: str) -> None:
    """The trainer ends after the batch that it trains on the weights of the roll-back."""
    keys = ("trainer.keep_weights=4", "trainer.checkpoint_every=2", f"async_training.mode={mode}")
    config, backend = small_config(tmp_path, *keys), FullDisk()
    async with small_run(config, backend=backend) as run:
        await run.train(4)
        newest = run.engine.version
        assert await command(run, newest - 1) == newest + 1
        backend.is_full = True
        with pytest.raises(CheckpointError):
            await run.train(6)
        assert backend.updates == 4, "another fourth one, of the third"
    async with small_run(config) as again:
        assert await again.trainer.resume()
        assert again.backend.updates == 3, "and not what was taken back"


async def test_a_trainer_that_ends_while_engines_load_says_so_to_whoever_serves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who serves them publishes what is committed again: they may be paused for ever."""
    monkeypatch.setattr(train, "PUBLISHED_S", 0.05)
    lock = TrainerLock()
    async with small_run(small_config(tmp_path)) as run:
        async with run.engine.loading() as load:
            await run.trainer.publisher.publish()
            await load.begun.wait()
            await let_publish(run.trainer, lock)
            assert lock.leaves_undone
        await let_publish(run.trainer, lock)
        assert not lock.leaves_undone


async def test_a_trainer_that_starts_beside_a_command_goes_on_from_what_that_serves(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.keep_weights=4", "trainer.checkpoint_every=2")
    pool = local_pool(config)
    async with small_run(config, pool=pool) as run:
        await run.train(4)
        async with run.engine.loading() as load:
            rolling_back = asyncio.create_task(command(run, 2))
            await load.begun.wait()
            async with small_run(config, pool=pool) as again:
                again.engine.name = run.engine.name
                resuming = asyncio.create_task(again.trainer.resume())
                await asyncio.sleep(0.05)
                load.may_end.set()
                await rolling_back
                await resuming
                assert again.backend.updates == 2


async def test_a_checkpoint_beside_a_roll_back_has_the_weights_that_are_served(
    tmp_path: Path,
) -> None:
    """The roll-back comes while the backend's state is taken."""

    class RolledBackMeanwhile(RecordingBackend):
        done = False

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            if not self.done:
                self.done = True
                asyncio.run_coroutine_threadsafe(command(run, 1), loop).result()
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
    saved = RecordingBackend()
    saved.load_state(path / "backend", state["backend"])
    assert saved.updates == 1


async def test_weights_that_are_adopted_stay_on_disk_until_they_are_loaded(tmp_path: Path) -> None:
    """Whoever commits, and so prunes, holds the store's lock."""

    class Looks(RecordingBackend):
        held: bool | None = None

        def load_weights(self, path: Any) -> None:
            with StoreLock(Path(path).parent).tried() as mine:
                self.held = not mine
            super().load_weights(path)

    config = small_config(tmp_path, "trainer.keep_weights=9")
    backend = Looks()
    async with small_run(config, backend=backend) as run:
        await run.train(4)
        await command(run, 2)
        await run.train(5)
        assert backend.held is True


async def test_a_version_that_was_written_before_a_roll_back_is_never_served(
    tmp_path: Path,
) -> None:
    """The command publishes while the trainer trains on, writes and waits for the store."""
    config = small_config(tmp_path, "trainer.keep_weights=20")
    async with small_run(config) as run:
        training = asyncio.create_task(run.train(12))
        async with waiting_for_groups(run, 3):
            loading = run.engine.loading()
            load = await loading.__aenter__()
            rolling_back = asyncio.create_task(command(run, 1))
            await load.begun.wait()
        await run.trained(4)  # on the weights of 3, by groups of 3
        assert run.trainer.progress.version == 5, "written, and waits for the lock"
        load.may_end.set()
        await loading.__aexit__(None, None, None)
        assert await rolling_back == 4
        await training
        assert "load 5" not in run.engine.calls
        progress = run.trainer.progress
        assert progress.rolled_back == {4: 1}
        assert served(run.engine) == run.backend.updates == 12 - (progress.published[4] - 1)


async def test_a_command_waits_until_the_engines_have_their_memory(tmp_path: Path) -> None:
    class RolledBackMeanwhile(RecordingBackend):
        """The command comes while the second step is computed."""

        rolling_back: Any = None

        def train_step(self, *args: Any) -> dict[str, float]:
            if len(self.columns) == 1:
                self.rolling_back = asyncio.run_coroutine_threadsafe(command(run, 0), loop)
                with pytest.raises(TimeoutError):
                    self.rolling_back.result(0.2)
            return super().train_step(*args)

    loop, backend = asyncio.get_running_loop(), RolledBackMeanwhile()
    lends = ("engine.release_memory=true", "async_training.partial_rollout=true")
    config = small_config(tmp_path, "trainer.keep_weights=20", *lends)
    async with small_run(config, backend=backend) as run:
        await run.train(6)
        version = await asyncio.wrap_future(backend.rolling_back)
    lent = False
    for call in run.engine.calls:
        lent = {"release": True, "resume": False, "resume weights": False}.get(call, lent)
        assert not (lent and call.startswith("load")), run.engine.calls
    assert run.trainer.progress.rolled_back == {version: 0}
    assert served(run.engine) == run.backend.updates < 6


async def test_memory_is_lent_once_a_batch_and_weights_load_before_the_cache_is_back(
    tmp_path: Path,
) -> None:
    """Four optimizer steps of a batch, a publication every four, another batch."""
    config = small_config(
        tmp_path,
        "engine.release_memory=true",
        "async_training.partial_rollout=true",
        "async_training.require_batches=4",
        "async_training.trigger_parameter_sync_step=4",
    )
    async with small_run(config) as run:
        await run.train(8)
    calls = [c for c in run.engine.calls if not c.startswith("pause")]
    one = ["release", "resume weights", "load", "resume kv_cache cuda_graph", "continue"]
    found = [c.split()[0] if c.startswith("load") else c for c in calls]
    assert "".join(f"{c}," for c in found).count("".join(f"{c}," for c in one)) == 2
    assert found.count("release") == 2
    assert run.engine.version == run.trainer.progress.version


async def test_a_resume_waits_for_engines_that_are_down(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.starvation_timeout_s=20")
    async with small_run(config) as run:
        await run.train(2)
    async with small_run(config) as again:
        again.engine.down = 3
        assert await again.trainer.resume()
        assert again.engine.down == 0
    impatient = small_config(tmp_path, "trainer.starvation_timeout_s=0.01")
    async with small_run(impatient) as again:
        again.engine.down = 9
        with pytest.raises(EngineError, match="connection refused"):
            await again.trainer.resume()


# -- canaries --------------------------------------------------------------------------------------


GUARD = ("publish.guard.n=16", "publish.guard.wait_s=20")


class Served:
    """Two engines that a `Publisher` publishes to, and a pool that says what their versions
    earn."""

    def __init__(self, folder: Path, *guard: str) -> None:
        config = small_config(folder, *guard)
        self.folder = folder
        self.pool = local_pool(config)
        self.engines = [FakeEngine(f"http://{name}") for name in "ab"]
        (folder / "base").mkdir(exist_ok=True)
        (folder / "base" / "weights").write_text("0")
        self.store = self.open_store()
        self.backend = RecordingBackend()
        self.updater = build_updater(config, self.backend)
        self.progress = self.updater.progress
        self.said: list[str] = []
        self.publisher = Publisher(
            config.publish,
            config.async_training,
            cast("list[EngineClient]", self.engines),
            self.store,
            self.updater,
            ComputeThread(),
            pool=self.pool,
            producer=cast(Any, None),
            phases=Phases(),
            transport=Disk(),
            notify=self.said.append,
        )

    def open_store(self) -> WeightStore:
        return WeightStore(self.folder / "weights", keep=4, base=self.folder / "base")

    async def give(self) -> bool:
        """Train a step and publish it; False: that is held up."""
        before = self.progress.version
        self.backend.updates += 1
        self.progress.updates += 1
        await self.publisher.publish()
        return self.progress.version > before

    async def command(self, to: int | None) -> int:
        engines = cast("list[EngineClient]", self.engines)
        store = self.open_store()
        return await roll_back(engines, store, self.pool, to, transport=Disk(), trains=True)

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

    @property
    def committed(self) -> int:
        current = self.store.current()
        assert current is not None
        return current.version


GOOD = [1, 1, 1, 0] * 8


@asynccontextmanager
async def canary(run: Served) -> AsyncIterator[None]:
    """Version 1 is tried out by the second engine."""
    async with run.publisher.running():
        await run.earn(0, *GOOD)
        await run.publisher.wait_judged()
        assert await run.give()
        await run.engines[1].serves(1)
        assert run.names == ["0", "1-canary"]
        assert run.committed == 0
        yield


async def test_a_canary_that_earns_as_much_is_published_to_all(tmp_path: Path) -> None:
    run = Served(tmp_path, *GUARD)
    async with canary(run):
        assert not await run.give(), "nothing is published beside a canary"
        await run.earn(1, *GOOD)
        await run.engines[0].serves(1)
        await run.engines[1].serves(2)
        assert run.names == ["1", "2-canary"], "and then what was held up"
        assert run.committed == 1


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(("about", "pause"), id="gone"),
        pytest.param(("about",), id="back before it is paused"),
    ],
)
async def test_a_canary_waits_for_engines_that_have_all_crashed(
    tmp_path: Path, lost: tuple[str, ...]
) -> None:
    run = Served(tmp_path, *GUARD)
    async with run.publisher.running():
        await run.earn(0, *GOOD)
        await run.publisher.wait_judged()
        refused = EngineUnavailableError("connection refused", refused=True)
        for engine in run.engines:
            engine.fails = dict.fromkeys(lost, refused)
        assert await run.give()
        await until(lambda: run.engines[0].calls)  # the second one was asked before
        run.engines[0].fails = {}
        await run.engines[0].serves(1)
        assert run.names == ["1-canary", "0"]


async def test_a_canary_that_earns_less_than_the_others_meanwhile_is_taken_back(
    tmp_path: Path,
) -> None:
    run = Served(tmp_path, *GUARD)
    async with canary(run):
        await run.earn(0, *GOOD)
        await run.earn(1, *[0] * 16)
        await run.publisher.wait_judged()
        assert run.names == ["2", "2"]
        assert [served(engine) for engine in run.engines] == [0, 0]
        assert not await run.give(), "nothing is published until that is trained"
        assert await run.publisher.adopt()
        assert run.backend.updates == 0
        assert run.progress.rolled_back == {2: 0}
        assert "version 1 is rolled back, version 2 has the weights of 0" in run.said[0]
        await run.publisher.saved(1)
        assert not await run.give(), "no checkpoint holds it: what crashes now would undo it"
        await run.publisher.saved(2)
        assert run.progress.version == 3


@pytest.mark.parametrize("rewards", [GOOD, [0] * 16])
async def test_a_verdict_on_a_canary_does_not_undo_a_roll_back_by_a_command(
    rewards: list[int], tmp_path: Path
) -> None:
    run = Served(tmp_path, *GUARD)
    async with canary(run):
        assert await run.command(None) == 2, "the canary is what is taken back"
        assert run.names == ["2", "2"]
        assert [served(engine) for engine in run.engines] == [0, 0]
        await run.earn(0, *GOOD)
        await run.earn(1, *rewards)
        await run.publisher.wait_judged()
        await run.publisher.wait_published()
        assert run.names == ["2", "2"]
        assert [served(engine) for engine in run.engines] == [0, 0]
        assert await run.publisher.adopt()
        assert run.progress.rolled_back == {2: 0}
        assert run.progress.published[1] < run.progress.published[0]
        assert not await run.publisher.adopt()


async def test_a_command_that_finds_the_next_version_written_takes_the_number_after_it(
    tmp_path: Path,
) -> None:
    """The trainer's transaction comes second, and ends without a word to the engines."""

    class Late(StoreLock):
        @asynccontextmanager
        async def held(self) -> AsyncIterator[None]:
            await may_begin.wait()
            async with super().held():
                yield

    may_begin = asyncio.Event()
    run = Served(tmp_path)
    assert await run.give()
    await run.publisher.wait_published()
    run.store.lock = Late(run.store.folder)
    assert await run.give()
    assert run.store.versions() == [1, 2]
    assert await run.command(0) == 3
    may_begin.set()
    await run.publisher.wait_published()
    assert run.names == ["3", "3"]
    assert run.store.versions() == [1, 3]
    assert not any("load 2" in engine.calls for engine in run.engines)
    assert await run.publisher.adopt()
    assert run.progress.version == 3
    await run.publisher.saved(3)
    assert await run.give()
    await run.publisher.wait_published()
    assert run.committed == 4


async def test_a_trainer_that_dies_beside_a_canary_leaves_it_to_the_next(tmp_path: Path) -> None:
    run = Served(tmp_path, *GUARD)
    async with canary(run):
        left = [(e.name, e.path) for e in run.engines]  # a kill leaves this and the store
        files = shutil.copytree(tmp_path / "weights", tmp_path / "copy")
    shutil.rmtree(tmp_path / "weights")
    shutil.copytree(files, tmp_path / "weights")
    config = small_config(tmp_path)
    async with small_run(config) as again:
        again.engine.name, again.engine.path = left[1]
        assert not await again.trainer.resume()
        await again.trainer.publisher.wait_published()
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
