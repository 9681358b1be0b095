"""`python -m benchmarks ui`: the dashboard with 1,000,000 stored steps, and what it costs the
gateway.

    pages   a browser opens each page of a gateway whose pool holds 1,000,000 steps: the time until
            its figures are there
    open    requests/s with the overview open, by requests/s without; the two take turns

The browser is Chromium, by Playwright (see `make test-ui`), on the same cores as everything else.
For the bound of `open` a page's requests are made by this process: who looks at a gateway has a
computer of their own. With the browser itself on these cores is a mere figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import aiohttp

from benchmarks.checks import BenchResult
from benchmarks.gateway import QUICK as SMALL
from benchmarks.gateway import running
from benchmarks.gateway.measure import GatewayBench, sample
from benchmarks.gateway.systems import Stepwell
from benchmarks.pool.workload import STEPS_PER_GROUP, small_calls
from stepwell.datapool import DataPoolClient, Step
from stepwell.trainer.errors import ConfigError

STEPS, QUICK_STEPS = 1_000_000, 3_200
BOUND_S = 1.0
SHARE = 0.95
CHUNK = 4096
CONNECTIONS = 16
ROUNDS, GROUPS = 7, 24
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
INSTALL = "pip install -c constraints.txt playwright, and a chromium (apt-get install chromium)"
CHANNEL = "stored"
OPENED = {
    "overview": ("overview", ".flow .node"),
    "groups": (f"groups?channel={CHANNEL}", "tbody tr"),
    "groups, a filter that finds few": (f"groups?channel={CHANNEL}&min_reward=99.5", "tbody tr"),
    "recently gone": (f"groups?view=gone&channel={CHANNEL}", "tbody tr, .empty"),
    "group": (f"group?channel={CHANNEL}&prompt_uid={{group}}", ".rollout"),
    "trajectories": (f"trajectories?channel={CHANNEL}", "tbody tr"),
    "trajectory": (f"trajectory?channel={CHANNEL}&uid={{trajectory}}", ".message"),
    "tokens": (f"trajectory?channel={CHANNEL}&uid={{trajectory}}&view=tokens", ".token.own"),
    "batches": ("batches", "h1"),
    "curation": ("curation", "h1"),
    "pool": ("pool", ".sums"),
}
"""Address of each page, and what is there once it can be used."""


async def run(*, quick: bool = False) -> BenchResult:
    """Both parts. A quick run stores few steps and keeps no bound.

    Raises:
        ConfigError: there is no Playwright or no browser.
    """
    if importlib.util.find_spec("playwright") is None or shutil.which(CHROMIUM) is None:
        raise ConfigError(f"the bench opens pages in a browser, which is missing: {INSTALL}")
    report = BenchResult()
    ours = Stepwell()
    async with running([ours], ours, SMALL) as bench:
        n = QUICK_STEPS if quick else STEPS
        began = time.monotonic()
        await store(bench.ours.pool, n)
        report.figures["steps"] = n
        report.figures["stored_in_s"] = round(time.monotonic() - began, 1)
        origin = f"http://127.0.0.1:{bench.ours.ports[0]}"
        await pages(origin, n, 1 if quick else 3, report)
        await throughput(bench, origin, 1 if quick else ROUNDS, 1 if quick else GROUPS, report)
    return report.without_bounds() if quick else report


# -- pages ---------------------------------------------------------------------------------------


async def store(pool: DataPoolClient, n: int) -> None:
    """Put `n` steps into the pool, in groups that are ready; few of them with a large reward."""
    coming = _steps(n // STEPS_PER_GROUP)
    while chunk := list(islice(coming, CHUNK)):
        await pool.submit_steps(chunk, CHANNEL)


def _steps(groups: int) -> Iterator[Step]:
    for i, call in enumerate(small_calls(groups, "g")):
        step = call.step()
        if call.is_last:
            high = i // STEPS_PER_GROUP % (groups // 8 or 1) == 1
            object.__setattr__(step, "reward", 100.0 if high else float(i % 2))
        yield step


async def pages(origin: str, n: int, rounds: int, report: BenchResult) -> None:
    """Each page in a browser that has seen none of them: the median of `rounds` has the bound."""
    names = {"group": f"g-{n // STEPS_PER_GROUP // 2}"}
    names["trajectory"] = f"{names['group']}-0"
    async with browser() as chromium:
        for name, (address, there) in OPENED.items():
            took = []
            for _ in range(rounds):
                context = await chromium.new_context(viewport={"width": 1440, "height": 900})
                page = await context.new_page()
                began = time.perf_counter()
                await page.goto(f"{origin}/ui#/{address.format(**names)}", wait_until="commit")
                await page.locator(there).first.wait_for(timeout=30_000)
                took.append(time.perf_counter() - began)
                await context.close()
            report.at_most(f"{name}, s", round(statistics.median(took), 3), BOUND_S)
            report.figures[f"{name}, slowest, s"] = round(max(took), 3)


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield found
        finally:
            await found.close()


# -- what it costs -------------------------------------------------------------------------------


async def throughput(
    bench: GatewayBench, origin: str, rounds: int, groups: int, report: BenchResult
) -> None:
    """Without a page, with what a page asks for, with the browser: in turns."""
    found: dict[str, list[float]] = {"without": [], "open": [], "browser": []}
    first = 0
    for turn in range(rounds + 1):
        for how in found:
            async with _looking(how, origin):
                measured = await sample(bench, bench.ours, CONNECTIONS, groups, first)
            first += groups
            if turn:  # the first round warms up
                found[how].append(measured.requests_per_s)
    shares = {
        how: statistics.median(a / b for a, b in zip(found[how], found["without"], strict=True))
        for how in ("open", "browser")
    }
    report.figures.update(
        {f"requests/s, {how}": round(statistics.median(v)) for how, v in found.items()}
    )
    report.figures["requests_with_a_browser_on_these_cores"] = round(shares["browser"], 3)
    report.at_least("requests_with_the_dashboard_open", round(shares["open"], 3), SHARE)


@asynccontextmanager
async def _looking(how: str, origin: str) -> AsyncIterator[None]:
    if how == "without":
        yield
    elif how == "browser":
        async with browser() as chromium:
            page = await chromium.new_page()
            await page.goto(f"{origin}/ui")
            await page.locator(".flow .node").first.wait_for()
            yield
    else:
        watching = asyncio.create_task(_watch(origin))
        try:
            await asyncio.sleep(1.0)
            yield
            if watching.done():
                await watching
                raise RuntimeError("the dashboard's stream ended: nobody looked")
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _watch(origin: str) -> None:
    """Ask for what the overview does: its stream, and its curves with each optimizer step. There is
    no trainer here, so a step is taken to end with every tick."""
    async with (
        aiohttp.ClientSession(f"{origin}") as session,
        session.get("/ui/api/live") as stream,
    ):
        stream.raise_for_status()
        async for line in stream.content:
            if line.startswith(b"data: "):
                async with session.get("/ui/api/metrics?key=reward/mean&key=loss") as answer:
                    answer.raise_for_status()
                    await answer.read()
