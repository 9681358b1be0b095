"""`python -m benchmarks resume [--kills N]`: `kill -9` of a part of a run loses nothing.

One run of the quickstart with small batches, as `stepwell train` starts it, under the fire of
`tests/chaos` (`lives.py`)::

    driver    the command's own process, with the trainer in it; it is started again at once, while
              Ray's processes of its former life are still dying
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

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

from benchmarks.checks import BenchResult
from stepwell.config.load import load_config
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import USED
from stepwell.datapool.types import TRAIN
from stepwell.layout import CHECKPOINTS
from stepwell.run.checks import training_prompts
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.ledger import LEDGER, audit, read_ledger
from stepwell.trainer.reclaim import TRAINED
from tests.chaos.faults import Action, plan
from tests.chaos.lives import Run

KINDS: tuple[tuple[Action, str], ...] = (
    ("kill", "driver"),
    ("kill", "driver"),
    *(("kill", part) for part in ("pool", "gateway", "engine")),
)
OPTIONS = (
    "logging.wandb=disabled",
    "run.name=resume",
    "trainer.train_batch_size=2",
    "trainer.checkpoint_every=2",
    "trainer.keep_checkpoints=2",
    "rollout.n=4",
    "rollout.max_outstanding_groups=4",
    "rollout.timeout_s=60",
    "data.val.size=2",
    "validation.every=0",
    "validation.n=1",
)


async def run(
    *,
    kills: int = 50,
    seed: Annotated[int, "the same one gives the same kills again"] = 0,
    folder: Annotated[Path | None, "kept, with run.log; none: a temporary one"] = None,
) -> BenchResult:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as temporary:
        base = (folder or Path(temporary)).absolute()
        base.mkdir(parents=True, exist_ok=True)
        under_fire = Run(base, OPTIONS)
        async with under_fire.running():
            await under_fire.fire(plan(f"{seed}/resume", kills, KINDS))
            await under_fire.finish()
        result = await _compare(under_fire, kills)
    result.figures["elapsed_s"] = time.monotonic() - began
    return result


async def _compare(run: Run, kills: int) -> BenchResult:
    config, books = load_config("quickstart", run.options(1)), run.books
    store = CheckpointStore(config.run.dir / CHECKPOINTS)
    ledger = store.folder / LEDGER
    source = training_prompts(config)
    n_draws = len(audit(ledger).draws)
    found = audit(ledger, order=[source.next()["instance_id"] for _ in range(n_draws)])
    state = store.load(store.folder / f"step_{store.steps()[-1]}")
    n_updates = state["progress"].updates
    async with DataPoolClient.local(folder=run.pool) as pool:
        groups = (await pool.get_statistics(TRAIN))["groups"]
    reasons = groups["drop_reasons"]
    acked = groups["acked"] + reasons.get(TRAINED, 0) + reasons.get(USED, 0)
    # Groups that the pool must have acked: in no update, but in the lease of one, too.
    settled = found.trained + found.dropped["not_trained"]
    final_drops = found.dropped.total() - found.returned
    ends = found.trained + final_drops + len(found.in_flight) + len(found.waiting)
    stuck = [v for v in books.violations if v.startswith("stuck")]
    unknown = abs(n_updates - len(found.updates)) + abs(state["backend"]["updates"] - n_updates)
    result = BenchResult()
    result.at_least("kills", books.faults.total(), kills)
    result.zero(
        kills_without_a_resume=len(stuck),
        lives_that_ended_by_themselves=len(books.violations) - len(stuck),
        prompts_skipped=len(found.skipped),
        prompts_doubled=len(found.doubled),
        prompts_unaccounted=abs(n_draws - ends),
        groups_acked_but_not_trained=abs(acked - settled),
        updates_not_in_the_ledger=unknown,
    )
    kinds = (f"{kind.removeprefix('kill ')} {n}" for kind, n in sorted(books.faults.items()))
    result.figures.update(
        kills_by_part=" ".join(kinds),
        lives=books.lives,
        starts_given_up=books.excused.total(),
        optimizer_steps=n_updates,
        optimizer_steps_lost_and_done_again=run.trained() - len(found.updates),
        prompts=n_draws,
        trained=found.trained,
        dropped=" ".join(f"{reason}: {n}" for reason, n in found.dropped.items()) or "none",
        issued_again=found.returned,
        in_flight_at_the_end=len(found.in_flight) + len(found.waiting),
        ledger_entries=len(read_ledger(ledger)),
        recovery_s_p50=statistics.median(books.recovery_s or [0.0]),
        recovery_s_max=max(books.recovery_s, default=0.0),
    )
    if books.violations:
        result.figures["violations"] = [{"violation": text} for text in books.violations]
    return result
