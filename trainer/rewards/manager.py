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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.trainer.config import RewardConfig, RewardFunctionConfig
from stepwell.trainer.config.rollout import CODE
from stepwell.trainer.errors import RewardError, RewardValueError
from stepwell.trainer.rewards.base import (
    RewardResult,
    RewardSample,
    call_within,
    close,
    crashed,
    describe,
    read_result,
    read_results,
)
from stepwell.trainer.rewards.data_sources import usual_reward
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.rewards.slime import SlimeReward
from stepwell.trainer.rewards.worker import RewardProcess
from stepwell.trainer.threads import in_thread

if TYPE_CHECKING:
    from stepwell.trainer.rewards.sandbox_fusion import SandboxFusion

log = logging.getLogger(__name__)

Outcome: TypeAlias = RewardResult | RewardError
"""A missing score is the error that it is missing for."""


RETRY_S = 0.1
"""Before the second call; doubles with each further one."""


class RewardManager:
    """Scores by one section: naive, parallel, batch or group, see `RewardConfig.manager`.

    Raises:
        RewardLoadError: a function cannot be found or made.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._sandbox: SandboxFusion | None = None
        """The server that runs programs; one for all functions that do."""
        if (server := config.sandbox_fusion) is not None:
            # With it comes aiohttp, 0.3 s, which each mistake that is found at a start would wait.
            from stepwell.trainer.rewards.sandbox_fusion import SandboxFusion

            self._sandbox = SandboxFusion(server.url, server.max_concurrent, config.timeout_s)
        self._by_source = {
            source: self._caller(function) for source, function in config.by_data_source.items()
        }
        self._usual: dict[str, _Caller] = {}
        """By name: what scores the data sources that the section names no function for."""
        self._default: _Caller | None = None
        if config.function is not None:
            self._default = self._caller(
                RewardFunctionConfig(function=config.function, kwargs=config.kwargs)
            )

    async def score(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        """One outcome per sample; raises for no failure of a reward."""
        outcomes: dict[int, Outcome] = {}
        callers: dict[int, _Caller] = {}
        for i, sample in enumerate(samples):
            try:
                callers[i] = self._caller_of(sample)
            except RewardError as e:
                outcomes[i] = e
        units = self._units(samples, callers)
        scored = await asyncio.gather(
            *(self._unit(callers[at[0]], [samples[i] for i in at]) for at in units)
        )
        for at, unit in zip(units, scored, strict=True):
            outcomes |= zip(at, unit, strict=True)
        return [outcomes[i] for i in range(len(samples))]

    async def aclose(self) -> None:
        for caller in (*self._by_source.values(), *self._usual.values(), self._default):
            if caller is not None:
                await caller.aclose()
        if self._sandbox is not None:
            await self._sandbox.aclose()

    def _caller(self, function: RewardFunctionConfig) -> _Caller:
        processes = self._config.worker_processes(function.function)
        kwargs = function.kwargs
        if self._sandbox is not None and function.function == CODE:
            kwargs = {**kwargs, "sandbox_fusion": self._sandbox}
        # Loaded here too where it runs elsewhere: what is wrong with it is known before the run.
        reward = load_reward(function.function, kwargs)
        if processes == 0 or hasattr(reward, "wait_loaded"):  # each process would load its own
            return _InThread(reward)
        return _InProcesses(function, processes, reward)

    def _caller_of(self, sample: RewardSample) -> _Caller:
        """
        Raises:
            RewardError: there is no function for its data source, or none that can be had.
        """
        caller = self._by_source.get(sample.data_source, self._default)
        if caller is not None:
            return caller
        name = usual_reward(sample.data_source, sample.extra_info.get("rm_type"))
        if self._config.manager in ("batch", "group"):
            raise RewardValueError(
                f"manager is {self._config.manager!r}, and {name}, the usual reward of "
                f"{sample.data_source!r}, scores one sample at a time; set manager to auto, or "
                "name a function"
            )
        if name not in self._usual:
            self._usual[name] = self._caller(RewardFunctionConfig(function=name))
        return self._usual[name]

    def _units(
        self, samples: Sequence[RewardSample], callers: Mapping[int, _Caller]
    ) -> list[list[int]]:
        """Split the samples into calls; return their indices, one list per call."""
        by_unit: dict[Any, list[int]] = {}
        for i, caller in callers.items():
            key: Any = i
            if self._config.manager == "group":
                key = (id(caller), samples[i].group)
            elif self._config.manager == "batch":
                key = id(caller)
            by_unit.setdefault(key, []).append(i)
        return list(by_unit.values())

    async def _unit(self, caller: _Caller, samples: Sequence[RewardSample]) -> list[Outcome]:
        """The outcomes of one call; what is missing is asked for again. A group is one question,
        asked again as a whole."""
        outcomes: list[Outcome | None] = [None] * len(samples)
        for attempt in range(self._config.max_attempts):
            todo = [i for i, o in enumerate(outcomes) if not isinstance(o, RewardResult)]
            if not todo:
                break
            if attempt:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))
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
        call = caller.describe(", ".join(sorted({s.data_source for s in samples})))
        n_steps = [None if s.trajectory is None else len(s.trajectory.steps) for s in samples]
        try:
            if config.manager in ("batch", "group"):
                lists = tuple(map(list, zip(*map(_arguments, samples), strict=True)))
                args = (list(samples),) if caller.takes_samples else lists
                results = await caller.call(config.timeout_s, call, args)
                return read_results(results, n_steps, call, config.reward_key)
            args = (samples[0],) if caller.takes_samples else _arguments(samples[0])
            result = await caller.call(config.timeout_s, call, args)
            return [read_result(result, call, config.reward_key, n_steps[0])]
        except RewardError as e:
            return [e] * len(samples)


def _arguments(sample: RewardSample) -> tuple[Any, ...]:
    return sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info


class _Caller(ABC):
    """Runner of a reward function, in a thread or in processes."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward
        self.takes_samples = isinstance(reward, SlimeReward)
        """It is called with samples, not with their four arguments."""

    def describe(self, data_source: str) -> str:
        return describe(self._reward, data_source)

    @abstractmethod
    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any: ...

    @abstractmethod
    async def aclose(self) -> None: ...


class _InThread(_Caller):
    """A coroutine function on the event loop, another one in a thread."""

    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any:
        # Of a function that does not compute all at once: to wait for it is not the call's time.
        async with getattr(self._reward, "places", None) or nullcontext():
            return await self._call(timeout_s, call, args)

    async def _call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any:
        if (loaded := getattr(self._reward, "wait_loaded", None)) is not None:
            try:
                await loaded()  # of a model that is computed here: not the call's time
            except Exception as e:  # whatever a model fails to load with: its score is missing
                raise crashed(call, e) from e
        return await call_within(timeout_s, call, self._reward, *args)

    async def aclose(self) -> None:
        await close(self._reward)


class _InProcesses(_Caller):
    """Each call in whichever of the processes is free."""

    def __init__(self, function: RewardFunctionConfig, processes: int, reward: Any) -> None:
        super().__init__(reward)
        self._all = [RewardProcess(function.function, function.kwargs) for _ in range(processes)]
        # The one used last comes first: it is warm, and the others need not start at all.
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        for process in reversed(self._all):
            self._free.put_nowait(process)

    async def call(self, timeout_s: float, call: str, args: tuple[Any, ...]) -> Any:
        process = await self._free.get()
        try:
            return await in_thread(process.score, timeout_s, call, *args)
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._free.put_nowait(process)

    async def aclose(self) -> None:
        for process in self._all:
            process.close()
