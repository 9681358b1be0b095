"""`python -m benchmarks idle`: CPU of a served run and its trainer while nobody calls.

`stepwell serve --config live` with a trainer attached, which waits for its first groups. The bound
is of the pool, the gateway and the trainer together, as a share of one core; the engine and Ray's
own processes are figures.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import psutil

from benchmarks.checks import BenchResult
from benchmarks.processes import python

BOUND = 0.03
START_S = 180.0
SETTLE_S = 10.0
"""After the last line: what a start leaves running ends in it."""
KINDS = {
    "ray::DataPoolActor": "pool",
    "ray::GatewayReplica": "gateway",
    "stepwell train": "trainer",
    "stepwell serve": "serve",
    "files.archive.archiver": "archiver",
    "engines.embedded": "engine",
    "ray::EngineServer": "engine's supervisor",
}
"""Names of our processes by words of their command lines; all others are Ray's and their guards."""
BOUNDED = ("pool", "gateway", "trainer")
OPTIONS = ("logging.wandb=disabled", "logging.console=plain", "gateway.port=0")


async def run(
    *, seconds: Annotated[float, "in which the CPU time is counted"] = 60.0
) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        run_dir, served, trained = (Path(folder) / name for name in ("run", "serve", "train"))
        serve = ("-m", "stepwell", "serve", "--config", "live", f"run.dir={run_dir}", *OPTIONS)
        attach = ("-m", "stepwell", "train", "--attach", str(run_dir))
        async with python(*serve, output=served):
            await _says(served, "Ctrl-C")
            async with python(*attach, output=trained):
                await _says(trained, "waiting for")
                await asyncio.sleep(SETTLE_S)
                before = _cpu_s()
                await asyncio.sleep(seconds)
                after = _cpu_s()
    shares = shares_of(before, after, seconds)
    result = BenchResult()
    ours = sum(shares[name] for name in BOUNDED)
    result.at_most("pool_gateway_trainer_cores", ours, BOUND)
    result.figures["cores"] = [{"process": name, "cores": share} for name, share in shares.items()]
    return result


def shares_of(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Cores that each kind of process was busy with, of CPU seconds at both ends.

    Raises:
        RuntimeError: one that has a bound was not seen, as if it cost nothing.
    """
    if missing := [name for name in BOUNDED if name not in before or name not in after]:
        raise RuntimeError(f"no process is known as {', '.join(missing)}; see KINDS")
    return {name: (after[name] - before.get(name, 0.0)) / seconds for name in sorted(after)}


async def _says(log: Path, words: str) -> None:
    async with asyncio.timeout(START_S):
        while words not in await asyncio.to_thread(log.read_text):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _cpu_s() -> dict[str, float]:
    """CPU seconds so far of what this process has started, by what it is."""
    seconds: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            kind = _kind(" ".join(process.cmdline()))
            seconds[kind] = seconds.get(kind, 0.0) + sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return seconds


def _kind(command: str) -> str:
    return next((kind for words, kind in KINDS.items() if words in command), "ray")
