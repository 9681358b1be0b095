"""This module serves an earlier version's weights on the engines of a live run, so that a bad one
is taken back by one command: `stepwell rollback RUN [--to K]`.

    a trainer is attached ──► it is asked (`trainer/rollback_file.py`), and trains on from there
    none is               ──► published from here, through the same transaction; the next trainer
                              goes on from there

Does not own: what is kept (`backends/weights/store.py`), what a trainer does (`releases.py`).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import WeightUpdateError
from stepwell.backends.weights import WeightStore, publish
from stepwell.datapool.types import TRAIN
from stepwell.errors import RunUnavailableError
from stepwell.run.connection import connect
from stepwell.run.folder import (
    TRAINER_LOCK,
    RunFile,
    holder,
    is_starting,
    live_run,
    only_trainer_in,
)
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.rollback_file import RollBackFile, wait_for


async def roll_back(run_dir: Path, to: int | None) -> str:
    """Serve version `to` (None: the one before) again; what was done, in words.

    Raises:
        RunUnavailableError: no run is alive in `run_dir`.
        VersionNotKeptError, WeightUpdateError: it is not on disk any more, or no engine takes it.
    """
    run = live_run(run_dir)
    if holder(run_dir, TRAINER_LOCK) is not None:
        return _ask_trainer(run_dir, to)
    with only_trainer_in(run_dir):
        return await _publish(run_dir, run, to)


def _ask_trainer(run_dir: Path, to: int | None) -> str:
    try:
        with RollBackFile(run_dir).asked(to) as answer:
            found = wait_for(answer, lambda: holder(run_dir, TRAINER_LOCK) is not None)
    except BlockingIOError:
        raise ConfigError(f"another `stepwell rollback {run_dir}` waits for its answer") from None
    if found is None:
        raise RunUnavailableError(
            f"the trainer in {run_dir} has ended meanwhile; run the command again"
        )
    if found.error is not None:
        raise WeightUpdateError(found.error)
    return (
        f"version {found.version} is served, with the weights of {found.weights_of}; "
        "the trainer goes on from them"
    )


async def _publish(run_dir: Path, run: RunFile, to: int | None) -> str:
    if run.engines is None:
        raise is_starting(run_dir)
    transport = run.config["engine"]["weight_transport"]
    store = WeightStore(
        run.engines.weights_dir,
        keep=run.config["trainer"]["keep_weights"],
        base=None if transport == "lora" else run.folder / run.config["model"]["path"],
    )
    current = store.current()
    of = store.find(to, current.version if current is not None else 0)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(connect(run_dir))
        engines = [await stack.enter_async_context(EngineClient(url)) for url in run.engines.urls]
        seen = [await engine.weight_version() for engine in engines]
        seen.append((await pool.get_statistics(TRAIN))["policy_version"])
        version = 1 + max(seen + ([current.version] if current is not None else []))
        path = store.write_again(version, of)
        await pool.advance_version(version)
        await publish(engines, path, version, "retract", store=store, transport=transport)
    return (
        f"version {version} is served, with the weights of {store.weights_of(version)}; "
        "the next trainer goes on from them"
    )
