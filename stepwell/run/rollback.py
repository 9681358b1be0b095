"""This module serves an earlier version's weights on the engines of a live run, so that a bad one
is taken back by one command: `stepwell rollback RUN [--to K]`.

The command publishes by itself, through the transaction that a trainer uses, too; they meet at the
weight store's lock. A trainer that is attached finds the version there and trains on from it, and
so does the next one.

Does not own: what is kept (`backends/weights/store.py`), what a trainer does
(`trainer/publish/publisher.py`).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.kinds import connect as connect_engine
from stepwell.backends.weights import WeightStore, stored_transport
from stepwell.run.connection import connect
from stepwell.run.folder import TRAINER_LOCK, holder, is_starting, live_run
from stepwell.trainer.publish.rollback import roll_back as publish_earlier


async def roll_back(run_dir: Path, to: int | None) -> str:
    """Serve version `to` (None: the one before) again; what was done, in words.

    Raises:
        RunUnavailableError: no run is alive in `run_dir`.
        UnsupportedByBackendError: the trainer could not go on from it.
        VersionNotKeptError, WeightUpdateError: it is not on disk any more, or no engine takes it.
    """
    run = live_run(run_dir)
    if run.engines is None:
        raise is_starting(run_dir)
    engine = EngineConfig.model_validate(run.config["engine"])
    transport = stored_transport(engine)
    store = WeightStore(
        run.engines.weights_dir,
        keep=run.config["trainer"]["keep_weights"],
        base=None if transport.adapter else run.folder / run.config["model"]["path"],
        prunes=False,
    )
    trains = holder(run_dir, TRAINER_LOCK) is not None
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(connect(run_dir))
        engines = [
            await stack.enter_async_context(connect_engine(engine, u)) for u in run.engines.urls
        ]
        version = await publish_earlier(
            engines, store, pool, to, transport=transport, trains=trains
        )
    return (
        f"version {version} is served, with the weights of {store.weights_of(version)}; "
        f"{'the' if trains else 'the next'} trainer goes on from them"
    )
