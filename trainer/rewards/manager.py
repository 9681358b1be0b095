"""Scores many samples with the configured functions: in which calls, where, how often.

::

    samples ──by data source──► units: one sample (naive) · the lists of many (batch)
                                       · the lists of one group (group)
                  ┌────────────────────────┘
                  ▼
    a thread, the event loop or a process ──► score, extra keys
                  │ raised, timed out, no number
                  └──► called again, max_attempts in all ──► RewardError: missing, never 0

Owns the calls and their retries. Does not own what becomes of a trajectory without a score
(`trainer/scoring.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from stepwell.trainer.config import (
    MANAGERS,
    RewardConfig,
    RewardFunctionConfig,
)
from stepwell.trainer.errors import RewardError
from stepwell.trainer.rewards.base import (
    RewardResult,
    RewardSample,
    call_within,
    close,
    describe,
    load_reward,
    read_result,
    read_results,
)
from stepwell.trainer.rewards.errors import RewardLoadError, RewardValueError
from stepwell.trainer.rewards.worker import RewardProcess
from stepwell.trainer.threads import in_thread

log = logging.getLogger(__name__)

Outcome: TypeAlias = RewardResult | RewardError
"""A missing score is the error that it is missing for."""


class RewardManager(Protocol):
    """What `RewardConfig.manager` may name by dotted path: a class made with the `RewardConfig`."""

    async def score(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        """One outcome per sample; raises for no failure of a reward."""
        ...

    async def aclose(self) -> None: ...


def build_manager(config: RewardConfig) -> RewardManager:
    """The manager of `config`.

    Raises:
        RewardLoadError: a function, or the manager's class, cannot be found or made.
    """
    if config.manager in MANAGERS:
        return Manager(config)
    from stepwell.datapool.dotted import resolve  # half of what a worker process would wait for

    try:
        manager: RewardManager = resolve(config.manager)(config)
    except Exception as e:  # any error of foreign code at import
        raise RewardLoadError(
            f"rollout.reward.manager is {config.manager!r}, which cannot be made "
            f"({type(e).__name__}: {e}); name a class as package.module:Class"
        ) from e
    return manager


class Manager:
    """The built-in managers: naive, parallel, batch and group, see `RewardConfig.manager`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._by_source = {
            source: self._caller(function) for source, function in config.by_data_source.items()
        }
        self._default: _Caller | None = None
        if config.function is not None:
            self._default = self._caller(
                RewardFunctionConfig(function=config.function, kwargs=config.kwargs)
            )

    async def score(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        units = self._units(samples)
        scored = await asyncio.gather(
            *(self._unit(caller, [samples[i] for i in indices]) for caller, indices in units)
        )
        outcomes: list[Outcome] = [_no_function(s) for s in samples]
        for (_, indices), unit in zip(units, scored, strict=True):
            for i, outcome in zip(indices, unit, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def aclose(self) -> None:
        for caller in self._callers():
            await caller.aclose()

    def _caller(self, function: RewardFunctionConfig) -> _Caller:
        processes = self._config.worker_processes(function.function)
        # Loaded here too where it runs elsewhere: what is wrong with it is known before the run.
        reward = load_reward(function.function, function.kwargs)
        if processes == 0:
            return _InThread(reward)
        return _InProcesses(function, processes, describe(reward, "…"))

    def _callers(self) -> list[_Caller]:
        default = [self._default] if self._default is not None else []
        return [*self._by_source.values(), *default]

    def _units(self, samples: Sequence[RewardSample]) -> list[tuple[_Caller, list[int]]]:
        """Which samples go into one call; those without a function are in none."""
        by_unit: dict[Any, tuple[_Caller, list[int]]] = {}
        for i, sample in enumerate(samples):
            caller = self._by_source.get(sample.data_source, self._default)
            if caller is None:
                continue
            key: Any = i
            if self._config.manager == "group":
                key = (id(caller), sample.group)
            elif self._config.manager == "batch":
                key = id(caller)
            by_unit.setdefault(key, (caller, []))[1].append(i)
        size = self._config.batch_size
        if self._config.manager != "batch" or size is None:
            return list(by_unit.values())
        return [
            (caller, indices[at : at + size])
            for caller, indices in by_unit.values()
            for at in range(0, len(indices), size)
        ]

    async def _unit(self, caller: _Caller, samples: Sequence[RewardSample]) -> list[Outcome]:
        """The outcomes of one call; what is missing is asked for again. A group is one question,
        asked again as a whole."""
        outcomes: list[Outcome | None] = [None] * len(samples)
        for attempt in range(self._config.max_attempts):
            todo = [i for i, o in enumerate(outcomes) if not isinstance(o, RewardResult)]
            if not todo:
                break
            if attempt:
                await asyncio.sleep(self._config.retry_delay_s * 2 ** (attempt - 1))
            if self._config.manager == "group":
                todo = list(range(len(samples)))
            async with self._slots:
                answers = await self._call(caller, [samples[i] for i in todo])
            for i, answer in zip(todo, answers, strict=True):
                outcomes[i] = answer
                if isinstance(answer, RewardError):
                    log.info("attempt %d of %d: %s", attempt + 1, self._config.max_attempts, answer)
        return [o for o in outcomes if o is not None]

    async def _call(self, caller: _Caller, samples: Sequence[RewardSample]) -> Sequence[Outcome]:
        config = self._config
        sources = sorted({s.data_source for s in samples})
        call = caller.describe(", ".join(sources))
        try:
            if config.manager not in ("batch", "group"):
                (s,) = samples
                result = await caller.call(
                    config.timeout_s,
                    call,
                    (s.data_source, s.solution_str, s.ground_truth, s.extra_info),
                )
                return [read_result(result, call, config.reward_key)]
            lists = (
                [s.data_source for s in samples],
                [s.solution_str for s in samples],
                [s.ground_truth for s in samples],
                [s.extra_info for s in samples],
            )
            results = await caller.call(config.timeout_s, call, lists)
            return read_results(results, len(samples), call, config.reward_key)
        except RewardError as e:
            return [e] * len(samples)


def _no_function(sample: RewardSample) -> RewardError:
    return RewardValueError(
        f"no reward function for data source {sample.data_source!r}; name it in "
        "rollout.reward.by_data_source, or set rollout.reward.function for all others"
    )


class _Caller(Protocol):
    """Where a function runs."""

    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any: ...

    def describe(self, data_source: str) -> str: ...

    async def aclose(self) -> None: ...


class _InThread:
    """A coroutine function on the event loop, another one in a thread."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward

    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any:
        return await call_within(timeout_s, call, self._reward, *args)

    def describe(self, data_source: str) -> str:
        return describe(self._reward, data_source)

    async def aclose(self) -> None:
        await close(self._reward)


class _InProcesses:
    """Each call in whichever of the processes is free."""

    def __init__(self, function: RewardFunctionConfig, processes: int, name: str) -> None:
        self._name = name
        self._all = [RewardProcess(function.function, function.kwargs) for _ in range(processes)]
        # The one used last comes first: it is warm, and the others need not start at all.
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        for process in reversed(self._all):
            self._free.put_nowait(process)

    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any:
        process = await self._free.get()
        try:
            return await in_thread(process.call, timeout_s, call, *args)
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._free.put_nowait(process)

    def describe(self, data_source: str) -> str:
        return self._name.replace(repr("…"), repr(data_source))

    async def aclose(self) -> None:
        for process in self._all:
            process.close()
