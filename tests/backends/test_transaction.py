"""The publication transaction against simulated replicas: every interleaving that chance finds.

The replicas are processes in the model only: they die at any await, are started again by a
supervisor that keeps to the store's lock (as `engines/supervisor.py` does), and are asked through
the methods of `EngineClient` that a publication uses. Real processes:
`tests/chaos/publication_kills.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from stepwell.backends.config import PublishMode
from stepwell.backends.engines.api import Engine, EngineState
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
    WeightUpdateError,
)
from stepwell.backends.weights import WeightStore, publish
from stepwell.backends.weights import store as store_module
from stepwell.backends.weights import transaction as module
from stepwell.backends.weights.transports import Disk
from stepwell.datapool.types import CANARY
from tests.engines import FakeEngine


class Replica(FakeEngine):
    """A simulated engine process behind an address, and its supervisor."""

    def __init__(self, url: str, store: WeightStore, steps: Callable[[], int] = lambda: 1) -> None:
        super().__init__(url)
        self.store = store
        self.steps = steps
        """Awaits within a request: where a kill can fall."""
        self.alive = True
        self.paused = False
        self.path = "base"
        self.hashes: dict[str, str] | None = None
        self.fails_once: dict[str, EngineError] = {}
        self.incarnation = 0

    @property
    def is_canary(self) -> bool:
        return self.name.endswith(CANARY)

    @property
    def serves(self) -> bool:
        return self.alive and not self.paused

    def kill(self) -> None:
        self.alive = False
        self.incarnation += 1

    async def request(self, *words: str) -> None:
        born = self.incarnation
        if not self.alive:
            raise EngineUnavailableError("connect call failed", refused=True)
        for _ in range(self.steps()):
            await asyncio.sleep(0)
            if self.incarnation != born:
                raise EngineUnavailableError("reset by peer")
        if (name := " ".join(words)) in self.fails_once:
            raise self.fails_once.pop(name)
        self.fail(*words)

    async def supervise(self) -> None:
        """Start the process again whenever it is dead, for ever."""
        while True:
            await asyncio.sleep(0)
            if self.alive:
                continue
            launched = self.store.current()
            for _ in range(self.steps()):
                await asyncio.sleep(0)
            self.version = launched.version if launched else 0
            self.paused, self.alive = True, True
            born = self.incarnation
            while self.incarnation == born and self.paused:
                with self.store.lock.tried() as mine:
                    if mine:
                        current = self.store.current()
                        for _ in range(self.steps()):
                            await asyncio.sleep(0)
                        if self.incarnation == born:
                            self.version = current.version if current else 0
                            self.paused = False
                            break
                await asyncio.sleep(0)

    async def about(self) -> EngineState:
        return (await super().about())._replace(device="cuda", dtype="float32", ranks=2)

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        await self.request("weight_hashes")
        if self.hashes is None:
            return None
        return [{"checksums": self.hashes, "parallelism_info": [{"tp_rank": 0}]}]

    async def pause(self, mode: str, timeout_s: float | None = None) -> None:
        await super().pause(mode, timeout_s)
        self.paused = True

    async def continue_(self) -> None:
        await super().continue_()
        self.paused = False


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path, keep=1000)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "_FENCE_RETRY_S", 0.0)
    monkeypatch.setattr(store_module, "LOCK_RETRY_S", 0.0)


def was_paused(replica: Replica) -> bool:
    return any(call.startswith("pause") for call in replica.calls)


def three(store: WeightStore) -> list[Replica]:
    return [Replica(f"http://{name}", store) for name in "abc"]


async def put(replicas: list[Replica], version: int, store: WeightStore, **options: Any) -> Any:
    return await publish(replicas, f"v{version}", version, store=store, **options)  # type: ignore[arg-type]  # the methods it asks for


async def test_a_replica_that_is_gone_is_fenced_and_the_others_get_the_version(
    store: WeightStore,
) -> None:
    a, b, c = replicas = three(store)
    c.kill()
    done = await put(replicas, 1, store)
    assert list(done.fenced) == [c.url]
    assert "is gone" in done.fenced[c.url]
    assert [r.version for r in (a, b)] == [1, 1]
    assert a.serves
    assert b.serves
    assert json.loads((store.folder / "current.json").read_text())["version"] == 1


async def test_nothing_is_committed_when_every_replica_is_gone(store: WeightStore) -> None:
    replicas = three(store)
    for replica in replicas:
        replica.kill()
    with pytest.raises(WeightUpdateError, match="any replica"):
        await put(replicas, 1, store)
    assert store.current() is None


async def test_a_replica_that_cannot_be_shown_to_be_gone_stops_the_commit(
    store: WeightStore,
) -> None:
    """It may be cut off and serve on: the version must not be committed past it."""
    a, b, c = replicas = three(store)
    c.fails["load 1"] = EngineTimeoutError("no answer")
    c.fails["pause"] = EngineTimeoutError("no answer")
    c.fails["state"] = EngineTimeoutError("no answer")
    with pytest.raises(WeightUpdateError, match="no answer"):
        await put(replicas, 1, store)
    assert store.current() is None
    assert [r.version for r in (a, b)] == [0, 0]
    assert a.serves
    assert b.serves


async def test_a_replica_that_does_not_answer_but_is_paused_is_left_out_and_brought_back(
    store: WeightStore,
) -> None:
    a, _, c = replicas = three(store)
    c.fails["load 1"] = EngineTimeoutError("no answer")

    async def healed(phase: str, when: str) -> None:
        if (phase, when) == ("commit", "after"):
            assert c.paused
            assert c.version == 0
            c.fails.clear()

    done = await put(replicas, 1, store, hook=healed)
    assert done.fenced == {}
    assert [r.version for r in (a, c)] == [1, 1]
    assert c.serves


async def test_one_of_which_nothing_is_known_is_brought_back_from_disk(store: WeightStore) -> None:
    *_, c = replicas = three(store)
    c.fails["about"] = EngineTimeoutError("no answer")

    async def healed(phase: str, when: str) -> None:
        if (phase, when) == ("commit", "after"):
            c.fails.clear()

    done = await put(replicas, 1, store, hook=healed)
    assert done.fenced == {}
    assert c.serves
    assert c.version == 1
    assert "load 1" in c.calls


async def test_one_that_stays_silent_stays_paused(store: WeightStore) -> None:
    _, _, c = replicas = three(store)
    c.fails["load 1"] = EngineTimeoutError("no answer")
    done = await put(replicas, 1, store)
    assert "is paused" in done.fenced[c.url]
    assert not c.serves
    c.fails.clear()
    done = await put(replicas, 2, store)  # the next publication brings it along
    assert done.fenced == {}
    assert c.version == 2
    assert c.serves


async def test_one_that_was_left_out_is_not_taken_back_behind_a_version_that_came_meanwhile(
    store: WeightStore,
) -> None:
    """A roll-back that waited for the lock publishes before the first brings its replica back."""
    *_, c = replicas = three(store)
    c.fails["load 1"] = EngineTimeoutError("no answer")

    async def replaced(phase: str, when: str) -> None:
        if (phase, when) == ("continue", "before"):
            c.fails.clear()
            await put(replicas, 2, store)

    await put(replicas, 1, store, hook=replaced)
    assert [r.version for r in replicas] == [2, 2, 2]
    assert all(r.serves for r in replicas)


@pytest.mark.parametrize("error", [EngineRequestError("disk is full"), EngineInternalError("500")])
async def test_one_that_lives_and_refuses_rolls_all_back(
    store: WeightStore, error: EngineError
) -> None:
    _, b, _ = replicas = three(store)
    await put(replicas, 1, store)
    b.fails["load 2"] = error
    with pytest.raises(WeightUpdateError) as e:
        await put(replicas, 2, store)
    assert e.value.replica == b.url
    assert e.value.serving == dict.fromkeys((r.url for r in replicas), 1)
    assert all(r.serves and r.version == 1 for r in replicas)
    current = store.current()
    assert current is not None
    assert current.version == 1


@pytest.mark.parametrize(("method", "mode"), [("about", "retract"), ("load 1", "drain")])
async def test_one_that_fails_before_it_was_paused_is_not_left_paused(
    store: WeightStore, method: str, mode: PublishMode
) -> None:
    """To find out whether it is gone it is paused: it lives, and goes on."""
    _, b, _ = replicas = three(store)
    b.fails[method] = EngineInternalError("500")
    with pytest.raises(WeightUpdateError) as e:
        await put(replicas, 1, store, mode=mode)
    assert was_paused(b)
    assert e.value.serving == dict.fromkeys((r.url for r in replicas), 0)
    assert all(r.serves and r.version == 0 for r in replicas)


@pytest.mark.parametrize("method", ["", "about", "load 2"])
async def test_engines_that_lent_memory_go_on_with_all_of_it_whatever_fails(
    store: WeightStore, method: str
) -> None:
    """They were paused by the lend, before the publication."""
    _, b, _ = replicas = three(store)
    await put(replicas, 1, store)
    completed: list[str] = []

    async def complete(engine: Engine) -> None:
        completed.append(engine.url)

    for replica in replicas:
        await replica.pause("abort")
    if method:
        b.fails[method] = EngineRequestError("disk is full")
    with nullcontext() if not method else pytest.raises(WeightUpdateError):
        await put(replicas, 2, store, complete=complete)
    assert sorted(completed) == [r.url for r in replicas]
    assert all(r.serves and r.version == (1 if method else 2) for r in replicas)


async def test_a_version_whose_file_changed_since_it_was_written_is_not_committed(
    store: WeightStore,
) -> None:
    replicas = three(store)
    await put(replicas, 1, store)

    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"tensors")

    path = store.write(2, save)
    (path / "model.safetensors").write_bytes(b"tensorS")
    with pytest.raises(WeightUpdateError, match=r"model\.safetensors is damaged"):
        await publish(replicas, path, 2, store=store)  # type: ignore[arg-type]  # as above
    assert [r.version for r in replicas] == [1, 1, 1]


async def test_replicas_of_one_layout_that_differ_are_not_committed(store: WeightStore) -> None:
    a, b, c = replicas = three(store)
    a.hashes = b.hashes = {"w": "01"}
    c.hashes = {"w": "02"}
    with pytest.raises(WeightUpdateError, match="tensor w differs") as e:
        await put(replicas, 1, store)
    assert e.value.replica == c.url
    c.hashes = a.hashes
    done = await put(replicas, 1, store)
    assert set(done.verified.values()) == {"agreement"}


async def test_a_replica_that_names_no_tensor_is_verified_by_its_version_alone(
    store: WeightStore,
) -> None:
    a, b, _ = replicas = three(store)
    a.hashes = {}
    b.hashes = {"w": "01"}
    done = await put(replicas, 1, store)
    assert list(done.verified.values()) == ["version", "agreement", "version"]


async def test_a_rollback_goes_to_what_is_committed_not_to_what_a_replica_had(
    store: WeightStore,
) -> None:
    """Paused at 1 by its supervisor while 2 was committed without it: it must not serve 1 again."""
    a, b, _ = replicas = three(store)
    store.commit(2, "v2")
    for replica in replicas:
        replica.version = 2
    b.version, b.paused = 1, True
    a.fails["load 3"] = EngineRequestError("disk is full")
    with pytest.raises(WeightUpdateError):
        await put(replicas, 3, store)
    assert all(r.version == 2 for r in replicas if r.serves)
    assert b.serves


async def test_an_unpaused_sglang_that_could_not_flush_is_paused_and_told_again(
    store: WeightStore,
) -> None:
    a, b, _ = replicas = three(store)
    a.fails_once["load 1"] = EngineRequestError(
        "Weights were updated, but the cache was not flushed because requests are still running"
    )
    done = await put(replicas, 1, store, mode="drain")
    assert done.fenced == {}
    assert all(r.serves and r.version == 1 for r in replicas)
    assert a.calls.count("load 1") == 2
    assert was_paused(a)
    assert not was_paused(b)


class Adapters(Disk):
    adapter = True


@pytest.mark.parametrize("mode", get_args(PublishMode))
async def test_an_adapter_is_exchanged_where_no_call_runs_or_begins(
    mode: PublishMode, store: WeightStore
) -> None:
    """SGLang refuses calls between an adapter and the next one, and a held one keeps it loaded."""
    replicas = three(store)
    await put(replicas, 1, store, mode=mode, transport=Adapters())
    for replica in replicas:
        assert replica.calls == ["pause abort", "load 1", "continue"]


async def test_even_an_error_that_nobody_expected_leaves_no_engine_paused(
    store: WeightStore,
) -> None:
    replicas = three(store)

    async def broken(phase: str, when: str) -> None:
        if (phase, when) == ("verify", "before"):
            raise RuntimeError("a bug")

    with pytest.raises(WeightUpdateError, match="a bug"):
        await put(replicas, 1, store, hook=broken)
    assert all(r.serves and r.version == 0 for r in replicas)


async def test_who_is_cancelled_in_a_publication_has_its_end_and_the_lock_until_then(
    store: WeightStore,
) -> None:
    """Ctrl-C of `stepwell rollback`: with its loop all else would end, and leave engines paused."""
    *_, c = replicas = three(store)

    async def roll_back() -> None:
        async with store.lock.held():
            await put(replicas, 1, store, locked=True)

    async with c.loading() as load:
        command = asyncio.ensure_future(roll_back())
        await load.begun.wait()
        command.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        with store.lock.tried() as free:
            assert not free
    with pytest.raises(asyncio.CancelledError):
        await command
    assert [r.version for r in replicas] == [1, 1, 1]
    assert all(r.serves for r in replicas)


async def test_a_publication_waits_for_a_supervisor_that_brings_its_engine_up_to_date(
    store: WeightStore,
) -> None:
    replicas = three(store)
    with store.lock.tried() as mine:
        assert mine
        publication = asyncio.ensure_future(put(replicas, 1, store))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(r.calls for r in replicas)
    await publication
    assert all(r.version == 1 for r in replicas)


async def test_a_canary_is_tried_out_alone_and_then_committed_or_taken_back(
    store: WeightStore,
) -> None:
    a, b, c = replicas = three(store)
    await put(replicas, 1, store)
    done = await put([c], 2, store, canary=True)
    assert done.fenced == {}
    assert [r.name for r in replicas] == ["1", "1", f"2{CANARY}"]
    assert all(r.serves for r in replicas)
    assert "load 2" not in " ".join(a.calls + b.calls)
    current = store.current()
    assert current is not None
    assert current.version == 1, "what restarts goes on with what is committed"
    await put(replicas, 2, store)
    assert [r.name for r in replicas] == ["2", "2", "2"]
    await put([c], 3, store, canary=True)
    await put(replicas, 4, store)
    assert [r.name for r in replicas] == ["4", "4", "4"]
    assert all(r.serves for r in replicas)


async def test_a_canary_that_a_dead_trainer_left_is_ended_by_what_is_committed(
    store: WeightStore,
) -> None:
    replicas = three(store)
    await put(replicas, 1, store)
    await put(replicas[:1], 2, store, canary=True)
    await put(replicas, 1, store)  # as `stepwell serve` does
    assert [r.name for r in replicas] == ["1", "1", "1"]
    assert all(r.serves for r in replicas)


async def test_a_canary_that_cannot_load_serves_on_what_is_committed(store: WeightStore) -> None:
    *_, c = replicas = three(store)
    await put(replicas, 1, store)
    c.fails[f"load 2{CANARY}"] = EngineRequestError("disk is full")
    with pytest.raises(WeightUpdateError, match="disk is full"):
        await put([c], 2, store, canary=True)
    assert [r.name for r in replicas] == ["1", "1", "1"]
    assert all(r.serves for r in replicas)


async def test_a_publication_that_fails_beside_a_canary_leaves_all_at_what_is_committed(
    store: WeightStore,
) -> None:
    a, _, c = replicas = three(store)
    await put(replicas, 1, store)
    await put([c], 2, store, canary=True)
    a.fails["load 2"] = EngineRequestError("disk is full")
    with pytest.raises(WeightUpdateError):
        await put(replicas, 2, store)
    assert [r.name for r in replicas] == ["1", "1", "1"]
    assert all(r.serves for r in replicas)


async def test_a_canary_before_anything_is_committed_is_refused(store: WeightStore) -> None:
    a, b, _ = replicas = three(store)
    with pytest.raises(WeightUpdateError, match="a canary needs a committed version"):
        await put([b], 1, store, canary=True)
    a.fails["load 2"] = EngineRequestError("disk is full")
    with pytest.raises(WeightUpdateError):
        await put(replicas, 2, store)
    assert [r.name for r in replicas] == ["0", "0", "0"]
    assert all(r.serves for r in replicas)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "drain"])
@pytest.mark.parametrize("seed", range(8))
async def test_no_replica_serves_an_old_version_after_a_commit_however_they_are_killed(
    store: WeightStore, seed: int, mode: Any
) -> None:
    """Thirty publications each, some tried out on a canary first, with kills at random awaits of
    random replicas all the while."""
    chance = random.Random(seed)
    steps = lambda: chance.randint(1, 6)  # noqa: E731 - a one-line draw
    replicas = [Replica(f"http://{i}", store, steps) for i in range(3)]
    supervisors = [asyncio.ensure_future(r.supervise()) for r in replicas]
    committed, watching, stale, kills = 0, True, [], 0

    async def watch() -> None:
        while watching:
            current = store.current()
            now = current.version if current else 0
            stale.extend((r.url, r.name, now) for r in replicas if r.serves and r.version < now)
            # What is not committed says so. (After a failed commit it is taken back, paused; with
            # `drain` nobody is paused, and one may have loaded what the next moment commits.)
            if mode != "drain":
                stale.extend(
                    (r.url, r.name, now)
                    for r in replicas
                    if r.serves and r.version > now and not r.is_canary
                )
            await asyncio.sleep(0)

    async def shoot() -> None:
        nonlocal kills
        while watching:
            for _ in range(chance.randint(5, 60)):
                await asyncio.sleep(0)
            victim = chance.choice(replicas)
            kills += victim.alive
            victim.kill()

    tasks = [asyncio.ensure_future(watch()), asyncio.ensure_future(shoot())]
    for version in range(1, 31):
        with suppress(WeightUpdateError):
            if chance.random() < 0.5:
                await put([chance.choice(replicas)], 2 * version - 1, store, mode=mode, canary=True)
                for _ in range(chance.randint(0, 60)):
                    await asyncio.sleep(0)
        with suppress(WeightUpdateError):
            # The canary's version, or the one that takes it back.
            await put(replicas, 2 * version - chance.randint(0, 1), store, mode=mode)
            committed += 1
        for _ in range(30):
            await asyncio.sleep(0)
    watching = False
    await asyncio.gather(*tasks)
    for supervisor in supervisors:
        supervisor.cancel()
    assert stale == []
    assert kills >= 15
    assert committed >= 5
