"""`python -m benchmarks resume [--kills N]`: `kill -9` of a part of a run loses nothing.

One run of the quickstart with small batches, as `stepwell train` starts it; and a killer::

    trainer   the command's own process; it is started again at once, while Ray's processes of its
              former life are still dying
    pool      the DataPool actor's process ──┐
    gateway   the gateway replica's process ─┼─ nobody is told and nobody starts them again but
    engine    the inference server ──────────┘  the run itself

Kills come at random moments, from the first second of a life on: some meet the start, a resume, a
checkpoint or the recovery from the kill before; after others the run is let alone until it trains
again. In the end it is asked to finish, and the books are compared:

- the ledger (`trainer/ledger.py`): every prompt that the source handed out, in its order, was
  trained once, dropped with a reason, or is in flight;
- the pool's journal: as many groups acked as the ledger says were trained;
- the last checkpoint: as many optimizer steps, in the model's own count, as the ledger has.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checks import BenchResult, Check
from stepwell.checks import training_prompts
from stepwell.datapool.remote.lease_keeper import USED
from stepwell.presets import load_config
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.ledger import LEDGER, Audit, audit, read_ledger
from stepwell.trainer.reclaim import TRAINED

KILLS = 50
QUICK_KILLS = 4
TARGETS = ("trainer", "trainer", "pool", "gateway", "engine")
"""A deck that is shuffled again when it is used up: each part gets its share of few kills too."""
TITLES = {"pool": "ray::DataPoolActor", "gateway": "ray::GatewayReplica"}
"""How Ray names their processes."""
ENGINE = "stepwell.backends.engines.embedded"
UP = "gateway at "
"""What a life prints when all its parts have come up."""
IN_A_ROW = 0.4
"""Of the kills come without waiting until the run trains again."""
DELAY_S = (0.0, 6.0)
"""From the moment that is waited for to the kill."""
PATIENCE_S = 600.0
"""The run must train again within it, or finish."""
OPTIONS = (
    *("logging.wandb=disabled", "logging.console=plain", "run.name=resume"),
    *("trainer.train_batch_size=2", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=2"),
    *("rollout.n=4", "rollout.max_outstanding_groups=4", "rollout.timeout_s=60"),
    *("data.val.size=2", "validation.every=0", "validation.n=1"),
)


@dataclass(slots=True)
class _Books:
    """What the killer saw."""

    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    """From a kill that was followed by peace to the next optimizer step."""
    lives: int = 0
    starts_given_up: int = 0
    """Lives that ended because a part was killed before it had come up: what a supervisor of the
    command starts again. A part that dies in its start is an error on purpose."""
    died: list[str] = field(default_factory=list)
    """Lives that ended later although nobody killed them: what they said last."""
    stuck: list[str] = field(default_factory=list)
    """Kills after which the run did not train again."""


class _Run:
    """The run under fire: one process after another."""

    def __init__(self, folder: Path, books: _Books) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ledger = folder / "checkpoints" / LEDGER
        self._log = folder.parent / "trainer.log"
        self._life_at = 0
        self._books = books
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []

    def options(self, total_steps: int) -> list[str]:
        return [*OPTIONS, f"run.dir={self.folder}", f"trainer.total_steps={total_steps}"]

    def start(self, total_steps: int = 100_000) -> None:
        command = (sys.executable, "-m", "stepwell.cli", "train", "--config", "quickstart")
        with self._log.open("ab") as log:
            self._life_at = log.tell()
            log.write(f"--- life {self._books.lives}\n".encode())
            self._process = subprocess.Popen(
                [*command, *self.options(total_steps)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._books.lives += 1

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the run was not started")
        return self._process

    def find(self, part: str) -> psutil.Process | None:
        """The process of `part` in this life, if it is there."""
        trainer = psutil.Process(self.process.pid)
        if part == "trainer":
            return trainer
        for child in trainer.children(recursive=True):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if part == "engine" and ENGINE in line:
                return child
            if part in TITLES and line and line[0].startswith(TITLES[part]):
                return child
        return None

    def kill(self, part: str) -> bool:
        """SIGKILL; False if the part is not there at the moment."""
        try:
            if part == "trainer":
                self._children = psutil.Process(self.process.pid).children(recursive=True)
            found = self.find(part)
            if found is None:
                return False
            found.kill()
        except psutil.NoSuchProcess:
            return False
        if part == "trainer":
            self.process.wait()
        return True

    def trained(self) -> int:
        """Optimizer steps so far, those of lost histories counted too."""
        try:
            return self.ledger.read_bytes().count(b'"event":"trained"')
        except FileNotFoundError:
            return 0

    def has(self, part: str) -> bool:
        return self.find(part) is not None

    def trains(self, before: int) -> bool:
        return self.trained() > before

    def last_words(self) -> str:
        """What this life printed, the end of it."""
        with self._log.open("rb") as log:
            log.seek(self._life_at)
            return log.read().decode(errors="replace")[-20_000:]

    def came_up(self) -> bool:
        return UP in self.last_words()

    async def gone(self) -> None:
        """Every process of the life that was killed last has ended."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._children, 60)
        for process in alive:
            process.kill()

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


async def run(
    *, kills: int = KILLS, quick: bool = False, folder: Path | None = None
) -> BenchResult:
    """All of it. A quick run has few kills.

    Args:
        folder: kept, with `trainer.log`; None: a temporary one.
    """
    kills = min(kills, QUICK_KILLS) if quick else kills
    books = _Books()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as temporary:
        base = temporary if folder is None else folder
        async with _running(Path(base) / "run", books) as under_fire:
            await _fire(under_fire, books, kills)
            await _finish(under_fire, books)
        result = await _compare(under_fire, books, kills)
    result.figures["elapsed_s"] = time.monotonic() - began
    return result


@asynccontextmanager
async def _running(folder: Path, books: _Books) -> AsyncIterator[_Run]:
    under_fire = _Run(folder, books)
    under_fire.start()
    try:
        yield under_fire
    finally:
        if under_fire.process.poll() is None:
            under_fire.kill("trainer")
        await under_fire.gone()


async def _fire(run: _Run, books: _Books, kills: int) -> None:
    rng = random.Random("killer")
    deck: list[str] = []
    while books.kills.total() < kills:
        deck = deck or rng.sample(TARGETS, len(TARGETS))
        part = deck.pop()
        if part != "trainer":  # it has to be there first
            await _until(run, books, partial(run.has, part), part)
        await asyncio.sleep(rng.uniform(*DELAY_S))
        _revive(run, books)
        before = run.trained()
        if not run.kill(part):
            continue
        books.kills[part] += 1
        killed = time.monotonic()
        print(
            f"kill {books.kills.total()}: {part} after {before} steps, life {books.lives}",
            file=sys.stderr,
            flush=True,
        )
        if part == "trainer":
            run.start()
        if rng.random() >= IN_A_ROW:
            kill = f"kill {books.kills.total()} of {part}"
            if await _until(run, books, partial(run.trains, before), kill):
                books.recovery_s.append(time.monotonic() - killed)


def _revive(run: _Run, books: _Books) -> None:
    """A run that ended by itself is a failure; and started again, to see whether it goes on."""
    if run.process.poll() is not None:
        if run.came_up():
            books.died.append(run.last_words())
        else:
            books.starts_given_up += 1
        run.start()


async def _until(run: _Run, books: _Books, happened: Callable[[], bool], what: str) -> bool:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        _revive(run, books)
        try:
            if happened():
                return True
        except psutil.NoSuchProcess:
            pass
        await asyncio.sleep(0.2)
    books.stuck.append(f"{what}: {run.last_words()}")
    return False


async def _finish(run: _Run, books: _Books) -> None:
    """Two more optimizer steps in peace, a stop as by Ctrl-C, and the regular end of the run."""
    before = run.trained()
    await _until(run, books, partial(run.trains, before + 1), "the end")
    run.interrupt()
    await asyncio.to_thread(run.process.wait, PATIENCE_S)
    done = CheckpointStore(run.folder / "checkpoints").steps()[-1]
    run.start(done + 2)
    if await asyncio.to_thread(run.process.wait, PATIENCE_S) != 0:
        books.died.append(run.last_words())


async def _compare(run: _Run, books: _Books, kills: int) -> BenchResult:
    config = load_config("quickstart", run.options(1))
    source = training_prompts(config)
    n_draws = len(audit(run.ledger).draws)
    found = audit(run.ledger, order=[source.next()["instance_id"] for _ in range(n_draws)])
    store = CheckpointStore(run.folder / "checkpoints")
    state = store.load(store.folder / f"step_{store.steps()[-1]}")
    n_updates = state["progress"].updates
    acked = await _acked(config.run.dir / "pool")
    final_drops = found.dropped.total() - found.returned
    ends = found.trained + final_drops + len(found.in_flight) + len(found.waiting)
    checks = {
        "kills": Check(books.kills.total(), kills, upper=False),
        "kills_without_a_resume": Check(len(books.stuck), 0),
        "lives_that_ended_by_themselves": Check(len(books.died), 0),
        "prompts_skipped": Check(len(found.skipped), 0),
        "prompts_doubled": Check(len(found.doubled), 0),
        "prompts_unaccounted": Check(abs(len(found.draws) - ends), 0),
        "groups_acked_but_not_trained": Check(abs(acked - _settled(found)), 0),
        "updates_not_in_the_ledger": Check(
            abs(n_updates - len(found.updates)) + abs(state["backend"]["updates"] - n_updates), 0
        ),
    }
    figures: dict[str, Any] = {
        "kills_by_part": " ".join(f"{part} {n}" for part, n in sorted(books.kills.items())),
        "lives": books.lives,
        "starts_given_up": books.starts_given_up,
        "optimizer_steps": n_updates,
        "optimizer_steps_lost_and_done_again": run.trained() - len(found.updates),
        "prompts": len(found.draws),
        "trained": found.trained,
        "dropped": " ".join(f"{reason}: {n}" for reason, n in found.dropped.items()) or "none",
        "issued_again": found.returned,
        "in_flight_at_the_end": len(found.in_flight) + len(found.waiting),
        "ledger_entries": len(read_ledger(run.ledger)),
        "recovery_s_p50": statistics.median(books.recovery_s) if books.recovery_s else 0.0,
        "recovery_s_max": max(books.recovery_s, default=0.0),
        "died": [{"life": i, "said": said[-400:]} for i, said in enumerate(books.died)],
    }
    if not books.died:
        del figures["died"]
    return BenchResult(checks, figures)


def _settled(found: Audit) -> int:
    """Groups that the pool must have acked: in no update, but in the lease of one, too."""
    return found.trained + found.dropped["not_trained"]


async def _acked(folder: Path) -> int:
    """Groups of the train channel acked, or dropped as trained, by the pool's own journal."""
    from stepwell.datapool.remote.client import DataPoolClient

    async with DataPoolClient.local(folder=folder) as pool:
        groups = (await pool.get_statistics("train"))["groups"]
    dropped = groups["drop_reasons"]
    return int(groups["acked"] + dropped.get(TRAINED, 0) + dropped.get(USED, 0))
