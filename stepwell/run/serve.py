"""This module starts the parts of a run, and serves them until it is told to stop.

    serve(config)       Ray, pool, gateway and engines, for agents to call: `stepwell serve`
    start_run(config)   the same for as long as a block runs, also below a trainer (`run/train.py`)

Loads no torch, which takes most of a start: what is trained is another module's, or process's.
Does not own how a part is started (`cluster/parts.py`) or what `run.json` says (`run/folder.py`).
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from stepwell.backends.errors import SupersededError, WeightUpdateError
from stepwell.backends.weights import Published, WeightStore, publish
from stepwell.backends.weights.transports import Disk, Lora
from stepwell.cluster.parts import POOL_NAME, Cluster, start_cluster
from stepwell.config.run import RunConfig
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.log_files import logging_to
from stepwell.datapool.remote.actor import SHARDS_FILE
from stepwell.datapool.sealed import remove_drafts
from stepwell.datapool.store.folder import holder
from stepwell.datapool.store.salvage import SHARDS, remove_journals
from stepwell.datapool.types import TRAIN
from stepwell.errors import RunUnavailableError
from stepwell.layout import ARCHIVE, LOGS, POOL, REPLAY, RUN_FILE, SERVE_LOG, TRAINER_LOG, WEIGHTS
from stepwell.run.folder import (
    STARTED_OVER,
    EnginesPart,
    GatewayPart,
    PoolPart,
    RunFile,
    begin,
    journal_folder,
    left_by_trainer,
    only_run_in,
    read_run,
    refuse_second_trainer,
)
from stepwell.run.record import record_run
from stepwell.track.output import print_line
from stepwell.trainer.errors import ConfigError

log = logging.getLogger(__name__)

WATCH_S = 0.5
"""A killed trainer is noticed within this."""


async def serve(config: RunConfig) -> None:
    """Pool, engines and gateway, until interrupted."""
    folder = config.run.dir
    with only_run_in(folder):
        if config.run.resume == "never":
            start_over(folder)
        run = take_folder(config, trains=False)
        with logged(folder, SERVE_LOG):
            # Programs read the address in the first line of the output.
            print_line(starting(config), sys.stderr)
            async with start_run(config, run, trains=False) as cluster:
                print_line(where_to_call(config, cluster))
                for line in _without_trainer(config):
                    log.info("%s", line)
                while True:
                    await asyncio.sleep(WATCH_S)
                    await _continue_engines(config, cluster)


def starting(config: RunConfig) -> str:
    """First message of a start, which takes from some seconds to minutes."""
    parts = "the pool, the gateway and an engine" if config.serves else "the pool"
    return f"starting Ray, {parts}; the model is {config.model.path}"


def where_to_call(config: RunConfig, cluster: Cluster) -> str:
    """Text that `stepwell serve` prints: where everything is, and what to do with it."""
    folder = config.run.dir
    needs = "" if cluster.key_file is None else f", admin key in {cluster.key_file}"
    lines = [
        f"gateway at {cluster.gateway_url}{needs}",
        *(f"           {url}" for url in cluster.gateway_urls[1:]),
        f"dashboard  {cluster.gateway_url}/ui",
        f"ray at     {cluster.ray.address}, namespace {cluster.ray.namespace}, pool {POOL_NAME}",
        f"run folder {folder}  (run.json says where everything is; logs are in {folder / LOGS})",
        f"call it    OPENAI_BASE_URL={cluster.gateway_url}/v1 any-agent",
        f"train      stepwell train --attach {shlex.quote(str(folder))}",
        *_without_trainer(config),
        "(Ctrl-C stops it)",
    ]
    return "\n".join(lines)


def _without_trainer(config: RunConfig) -> list[str]:
    """A trainer with agents of its own limits how far they run ahead, and nobody leases yet."""
    if (most := config.max_outstanding_groups) is None or not config.serves:
        return []
    pool = config.pool_of_served
    limit = (
        f"{most} groups open or ready (rollout.max_outstanding_groups): who declares another one "
        "(x-prompt-uid, POST /v1/groups, gateway.groups.form=first_prompt) waits, for "
        f"{config.gateway.queue_timeout_s:g} s (gateway.queue_timeout_s), and is refused; agents "
        "that nobody here starts need rollout.agent and data null, as "
        "`--config live` has them"
    )
    if pool.channel(TRAIN).limit_without_consumer:
        return [f"nobody leases what is recorded until a trainer is attached; the limit is {limit}"]
    days = pool.retention_days
    disk = "nothing bounds the disk (pool.retention_days)"
    if days is not None:
        disk = f"on disk for {days:g} days (pool.retention_days)"
    return [
        "nobody leases what is recorded until a trainer is attached; agents go on, payloads beyond "
        f"{(pool.memory_limit_bytes or 0) / 1e9:g} GB (pool.memory_limit_bytes) are on disk only, "
        f"and {disk}",
        f"from the first trainer on, also when it has died, the limit is {limit}",
    ]


async def _continue_engines(config: RunConfig, cluster: Cluster) -> None:
    """A trainer that was killed may have been publishing: its engines are paused, or have what was
    never committed. What is committed is published to them again; agents only wait."""
    with left_by_trainer(config.run.dir) as pid:
        if pid is None:
            return
        keep = config.trainer.keep_weights
        store = WeightStore(config.run.dir / WEIGHTS, keep=keep, prunes=False)
        committed = store.current() or Published(0, str(config.engine.model_path))
        log.warning("trainer %d was killed; version %d is served on", pid, committed.version)
        try:
            await publish(
                cluster.engines,
                committed.path,
                committed.version,
                "retract",
                store=store,
                transport=Lora() if committed.adapter else Disk(),
                seen=committed.version,
            )
        except SupersededError:  # `stepwell rollback` has given all engines another one
            pass
        except WeightUpdateError as e:  # the next trainer publishes; supervisors restart engines
            log.warning("engines may stay paused until a trainer is attached: %s", e)


@contextmanager
def logged(folder: Path, name: str = TRAINER_LOG) -> Iterator[None]:
    """The log of this process is a file in the run's folder, which the error of a run names."""
    path = folder / LOGS / name
    with logging_to(path):
        try:
            yield
        except Exception as e:  # whatever ends a run is told, and raised again
            log.info("the run has failed", exc_info=True)  # the console has one line of it
            e.add_note(f"see {path}, and the logs of the other parts beside it")
            raise


def take_folder(config: RunConfig, *, trains: bool = True) -> RunFile:
    """Write `run.json` before anything else, logs included: however this start ends, the next one
    takes the folder for a run's (`refuse_to_remove`)."""
    forget_weights(config, trains=trains)
    return begin(config)


@asynccontextmanager
async def start_run(
    config: RunConfig, run: RunFile, *, trains: bool = True
) -> AsyncIterator[Cluster]:
    """The running parts, and a `run.json` that says where they are.

    Args:
        run: by `take_folder`.
        trains: see `start_cluster`.
    """
    await asyncio.to_thread(remove_drafts, config.run.dir, (*STARTED_OVER, ARCHIVE))
    async with start_cluster(config, trains=trains) as cluster:
        parts: dict[str, Any] = {"ray": cluster.ray, "pool": PoolPart(name=POOL_NAME)}
        if config.serves:
            parts |= {
                "gateway": GatewayPart(urls=cluster.gateway_urls, key_file=cluster.key_file),
                "engines": EnginesPart(
                    urls=tuple(engine.url for engine in cluster.engines),
                    weights_dir=config.run.dir.absolute() / WEIGHTS,
                ),
            }
        run = run.model_copy(update=parts)
        run.write(config.run.dir)
        record_run(run, cluster.ray.namespace)
        yield cluster


def forget_weights(config: RunConfig, *, trains: bool) -> None:
    """Engines begin with the weights that were published last, so that agents that come back are
    served by what they had; not if those are of another model, or if nobody is served before the
    trainer has published its checkpoint's. A roll-back stays: the checkpoint may not know of it.
    """
    try:
        before = read_run(config.run.dir)
        model = (before.folder / before.config["model"]["path"]).resolve()
    except (RunUnavailableError, KeyError):
        model = None
    folder = config.run.dir / WEIGHTS
    is_first = trains and config.rollout.agent is not None and not _is_roll_back(folder)
    is_another = model != config.model.path.resolve()
    if folder.is_symlink():  # to a folder that another run may have, too
        if is_another:
            folder.unlink()
    elif is_another or is_first:
        shutil.rmtree(folder, ignore_errors=True)


def _is_roll_back(folder: Path) -> bool:
    """True if the committed version of a store has the weights of an earlier one."""
    if not folder.is_dir():
        return False
    try:
        store = WeightStore(folder)
        current = store.current()
        return current is not None and store.weights_of(current.version) != current.version
    except DamagedFileError:
        return False


def start_over(folder: Path) -> None:
    """Remove what a run writes, and nothing else: `run.dir` may be any folder, and so may the
    `pool.journal_dir` that the last run had.

    Raises:
        ConfigError: a live process uses the run's pool, or trains in it.
    """
    refuse_second_trainer(folder)
    elsewhere = _journals_elsewhere(folder)
    for pool in (folder / POOL, *elsewhere):
        for journal in (pool, *pool.glob(SHARDS)):
            if (pid := holder(journal)) is not None:
                raise ConfigError(
                    f"run.resume is never, but process {pid} has the pool of {folder} open; stop "
                    "that run first, or choose another run.name"
                )
    for pool in elsewhere:
        remove_journals(pool)
        (pool / SHARDS_FILE).unlink(missing_ok=True)
    for path in (folder / name for name in (*STARTED_OVER, REPLAY, RUN_FILE)):
        if path.is_file():
            path.unlink()
        else:  # a link to a folder stays
            shutil.rmtree(path, ignore_errors=True)


def _journals_elsewhere(folder: Path) -> list[Path]:
    """The `pool.journal_dir` of the last run in the folder, if it had one; not that of a run whose
    folder was copied here."""
    with suppress(RunUnavailableError, DamagedFileError):  # no run was here, or none that says it
        run = read_run(folder)
        journal = journal_folder(folder)
        is_its_own = (run.folder / run.config["run"]["dir"]).resolve() == folder.resolve()
        return [journal] if is_its_own and journal != folder else []
    return []
