"""This module runs agents against the gateway, so that a rollout that fails is never scored, and is
made again if the agent was not at fault.

`RolloutWorker` (a Ray actor) runs the rollouts of whole groups on its own event loop and talks to
the gateway by HTTP only, like any agent. One rollout::

    init_trajectory ──► agent(task, base_url, api_key) ──► complete_trajectory(reward)
        │                   │ raised, timed out
        │                   └──► abort_trajectory(reason) ──► next attempt, or the rollout is lost
        └──► "closed": the group's deadline came first

A failed rollout is aborted with its reason and never scored 0. Whose failure it was, the gateway
says (`GET /health`, `undisturbed_s`): an attempt during which the gateway was restarted, or lost
its engines or the pool, has failed through no fault of the agent's, and so has one that raised
`InfrastructureError`. It does not count against `rollout.max_attempts`, and is made again as soon
as an engine answers::

    attempt fails ──undisturbed──► the agent's: counted; the last one loses the rollout
        └──disturbed──► aborted, to be made again ──an engine answers──► next attempt
                            └──none within OUTAGE_S, or the group has closed──► INFRASTRUCTURE

At most `rollout.concurrency` agents run at once. A harness's rollout is set up before its turn and
graded after it: meanwhile others run.

Does not own: scoring (an agent that returns None leaves its trajectory unscored, the trainer scores
it), group readiness (the pool), which prompt is rolled out (`producer.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import ray
from pydantic import SecretStr

from stepwell.datapool.heap import settle_heap
from stepwell.datapool.log_files import log_to_file, numbered_log
from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.types import GREEDY, MAX_REWARD, TRAIN, is_reward
from stepwell.trainer.config import RolloutConfig, ValidationConfig
from stepwell.trainer.config.harness import HARNESS
from stepwell.trainer.data import Task
from stepwell.trainer.errors import (
    HarnessError,
    InfrastructureError,
    RolloutError,
    first_of,
    shown,
)
from stepwell.trainer.plain import plain_text
from stepwell.trainer.rollout.agents import Agent, agent_of_workers, is_generate, load_agent
from stepwell.trainer.rollout.gateway import (
    PATIENCE_S,
    RETRY_S,
    ClosedError,
    CompletedError,
    GatewayClient,
    UnreachableError,
)
from stepwell.trainer.rollout.harness import Harness, Rollout
from stepwell.trainer.slime.generate import GenerateRollouts

log = logging.getLogger(__name__)

T = TypeVar("T")

OUTAGE_S = 60.0
"""A rollout that lost its engine waits for one so long, within its group."""
OUTAGES = 8
"""Attempts in a row that a rollout loses to infrastructure before its group is given up."""
OUTAGE_PAUSE_S = (0.25, 10.0)
"""Before the next attempt: doubles, from the first to the second."""
RECOVERY_S = 900.0
"""The producer waits for workers, gateway and engine so long: an engine may load for ten minutes
(`engine.startup_timeout_s`). The run ends if they are not back: no rollout can be run any more."""
ELSEWHERE = " (the gateway was there: does the agent call the base_url that it is given?)"
"""Beside an agent's connection error: clients name no address, and most have one by default."""
CANCEL_S = 10.0
"""Seconds that an agent has to end in when its rollout is cut off or cancelled."""
COMPLETE = "complete"
TIMEOUT = "timeout"
"""End of a rollout that ran longer than `rollout.timeout_s`, or its harness's."""
NO_STEPS = "no_steps"
"""End of a rollout whose agent returned without a call to the model; the pool counts it as used."""
CLOSED = "closed"
"""End of a rollout whose group was closed before it could end."""
INFRASTRUCTURE = "infrastructure"
"""End of a rollout that worker, gateway, engine or pool failed; and the reason under which its
group is dropped, to be issued again."""


def read_reward(agent: str, returned: object) -> dict[str, Any]:
    """Return the body of `complete_trajectory` for what the agent at the path `agent` returned.

    Raises:
        RolloutError: it is no reward. Nothing is converted: "347" would be a reward of 347.
    """
    if isinstance(returned, list) and all(r is None or is_reward(r) for r in returned):
        return {"step_rewards": [None if r is None else float(r) for r in returned]}
    if returned is None or is_reward(returned):
        return {"reward": None if returned is None else float(returned)}
    named = returned if isinstance(returned, int | float) else f"a {type(returned).__name__}"
    raise RolloutError(
        f"{agent} returned {named}; return a number within ±{MAX_REWARD:g}, a list of one per "
        "call, or None to leave the rollout unscored"
    )


async def _until_cancelled(agent: Coroutine[Any, Any, T]) -> T:
    """Await `agent`; one that goes on though it is cancelled, as a loop with a bare `except` does,
    is left behind."""

    async def run() -> tuple[T, None] | tuple[None, SystemExit]:
        try:
            return await agent, None
        except SystemExit as e:  # of a task of its own it would end the process
            return None, e

    running = asyncio.create_task(run())
    try:
        result, left = await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({running}, timeout=CANCEL_S)
        if not running.done():
            log.warning(
                "an agent goes on %g s after it was cancelled: does it catch CancelledError, in a "
                "bare `except`? Its rollout has ended",
                CANCEL_S,
            )
            raise
        result, left = running.result()
    if left is not None:
        raise left
    return cast(T, result)


class RolloutWorker:
    """Runs groups of rollouts; one per process (see `start_workers`).

    Args:
        gateway_urls: of the gateway's replicas.
        key: the gateway's admin key; None: it has no keys.
        log_file: what the process logs, and what agents print, goes there, too.
        logs: folder of the logs of harnesses, one a rollout; None: they are not kept.
        run_dir: folder of the run, see `Harness`.
        tokenizer_path, validation: for functions of slime's form, see `GenerateRollouts`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        gateway_urls: Sequence[str],
        key: SecretStr | None = None,
        log_file: Path | None = None,
        *,
        logs: Path | None = None,
        run_dir: Path | None = None,
        tokenizer_path: Path | None = None,
        validation: ValidationConfig | None = None,
    ) -> None:
        log_to_file(log_file)
        self._config = config
        self._gateway = GatewayClient(gateway_urls, key)
        self._agent: Agent
        if config.harness is None:
            self._agent = load_agent(
                config.agent or "", config.agent_args, environment=config.environment
            )
        else:
            self._agent = Harness(
                config.harness, logs=logs, run_dir=run_dir, transcript=self._gateway.transcript
            )
        self._folders = asyncio.Semaphore(2 * config.concurrency)
        """Rollouts of a harness that are set up, run or graded: while some run, as many others are
        made ready, or graded."""
        self._generate: GenerateRollouts | None = None
        if is_generate(self._agent):
            self._generate = GenerateRollouts(
                self._agent, config, self._gateway, tokenizer_path or Path(), validation
            )
        self._slots = asyncio.Semaphore(config.concurrency)
        self._traced: set[tuple[str, int | None]] = set()
        """Lines of code whose traceback is in the log: every rollout may fail at the same one."""
        settle_heap()

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        """Run `n` rollouts of `task`, the last `n_greedy` of them as greedy baselines; returns how
        they ended, failures by their reason: {"complete": 6, "timeout": 1, "KeyError: 'a'": 1}.

        Raises:
            RolloutError: the gateway refuses to begin rollouts; none can be run.
        """
        marks: list[dict[str, Any]] = [{"rollout_index": index} for index in range(n)]
        for mark in marks[n - n_greedy :]:
            mark[GREEDY] = True
        ends = await asyncio.gather(
            *(self._rollout(task, prompt_uid, mark, channel) for mark in marks)
        )
        return dict(Counter(ends))

    async def ready(self, patience_s: float = RECOVERY_S) -> None:
        """Returns once the gateway answers and has an engine.

        Raises:
            RolloutError: not within `patience_s`; or it refuses this worker's key.
        """
        await self._gateway.ready(patience_s)

    async def close(self) -> None:
        await self._gateway.close()

    async def _rollout(
        self, task: Task, prompt_uid: str, mark: dict[str, Any], channel: str
    ) -> str:
        began, attempts = time.monotonic(), count()
        failures, outages, end = 0, 0, INFRASTRUCTURE
        while outages < OUTAGES:
            async with self._set_up(task) as rollout, AsyncExitStack() as slot:
                await slot.enter_async_context(self._slots)
                final = failures + 1 == self._config.max_attempts
                attempt = next(attempts)
                end = await self._attempt(
                    task, prompt_uid, mark, attempt, final, channel, rollout, slot
                )
                if end == INFRASTRUCTURE:
                    if not await self._outlasts(outages, prompt_uid):
                        break
                    outages += 1
                    continue
            if end == CLOSED and await self._gateway.was_disturbed(began):
                return INFRASTRUCTURE
            failures, outages = failures + 1, 0
            if end in (COMPLETE, NO_STEPS, CLOSED) or failures == self._config.max_attempts:
                break
        return end

    @asynccontextmanager
    async def _set_up(self, task: Task) -> AsyncIterator[Rollout | None]:
        """Set a harness's rollout up before it has a slot; None: the agent is no harness."""
        if not isinstance(self._agent, Harness):
            yield None
            return
        async with self._folders, self._agent.set_up(task) as rollout:
            yield rollout

    async def _outlasts(self, outages: int, prompt_uid: str) -> bool:
        """Wait for gateway and engine; False: in vain."""
        shortest, longest = OUTAGE_PAUSE_S
        await asyncio.sleep(min(shortest * 2**outages, longest))
        try:
            await self.ready(OUTAGE_S)
        except UnreachableError as e:
            log.warning("a rollout of %s waited in vain: %s", prompt_uid, e)
            return False
        return True

    async def _attempt(
        self,
        task: Task,
        prompt_uid: str,
        mark: dict[str, Any],
        attempt: int,
        final: bool,
        channel: str,
        rollout: Rollout | None,
        slot: AsyncExitStack,
    ) -> str:
        """Run one attempt; return its end: COMPLETE, NO_STEPS, CLOSED, INFRASTRUCTURE, or why the
        agent failed. `slot` is given back when the agent calls the model no more."""
        began = time.monotonic()
        try:
            started = await self._gateway.ask(
                "/init_trajectory",
                {
                    # Chosen here, so that asking again opens no second one.
                    "trajectory_uid": uuid.uuid4().hex,
                    "prompt_uid": prompt_uid,
                    "channel": channel,
                    "attempt": attempt,
                    "metadata": mark,
                },
            )
        except ClosedError as closed:
            log.info("a rollout of %s comes too late: %s", prompt_uid, closed)
            return CLOSED
        except UnreachableError as e:
            log.warning("a rollout of %s could not begin: %s", prompt_uid, e)
            return INFRASTRUCTURE
        base_url: str = started["base_url"]
        machine_failed = False
        try:
            async with asyncio.timeout(self._config.timeout_s) as limit:
                if rollout is None:
                    result = await _until_cancelled(self._run(task, started, mark, channel))
                else:
                    await rollout.play(base_url, started.get("api_key", "none"))
                    await slot.aclose()
                    if (ends := limit.when()) is not None:
                        limit.reschedule(ends + rollout.verifier_s)
                    result = read_reward(HARNESS, await rollout.grade())
            ended = await self._gateway.ask(f"{base_url}/v1/complete_trajectory", result)
        except asyncio.CancelledError:
            if (us := asyncio.current_task()) is None or us.cancelling():
                await self._abort(base_url, "cancelled", patience_s=0)
                raise
            reason = "CancelledError: the agent was cancelled from within"
        except ClosedError as closed:
            log.info("a rollout of %s had ended already: %s", prompt_uid, closed)
            return COMPLETE if isinstance(closed, CompletedError) else CLOSED
        except ENDS:
            raise
        except BaseException as raised:  # noqa: BLE001 - an agent is foreign code
            error = first_of(raised)
            if isinstance(error, TimeoutError) and (rollout is not None or limit.expired()):
                reason = TIMEOUT
            else:  # also a time limit of the agent's own
                machine_failed = isinstance(error, InfrastructureError)
                reason = self._why_failed(raised, base_url)
        else:
            return NO_STEPS if ended.get("outcome") == "aborted" else COMPLETE
        origin = base_url.rsplit("/", 2)[0]
        disturbed = machine_failed or await self._gateway.was_disturbed(began, origin)
        log.warning(
            "rollout %d of %s failed (attempt %d%s): %s",
            mark["rollout_index"],
            prompt_uid,
            attempt,
            ", during an outage" if disturbed else "",
            reason,
        )
        if disturbed:
            reason = f"{INFRASTRUCTURE}: {reason}"
        elif "Connect" in reason.partition(":")[0]:
            reason += ELSEWHERE
        if (end := await self._abort(base_url, reason, will_retry=disturbed or not final)) is None:
            return INFRASTRUCTURE if disturbed else reason
        return end

    def _why_failed(self, error: BaseException, base_url: str) -> str:
        """Return the error of an agent as a reason; log the traceback of the first from a place. An
        error of a harness has its words alone, unless a function of the user's is behind it."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_told = isinstance(error, HarnessError) and error.__cause__ is None
        if (place := (frame.filename, frame.lineno)) not in self._traced and not is_told:
            self._traced.add(place)
            log.warning("the first rollout that failed there", exc_info=error)
        # Without the rollout's own URL: the same failure of many rollouts is one reason.
        path = urlsplit(base_url).path or base_url
        error = first_of(error)  # which may have been raised nowhere
        text = shown(error).replace(base_url, "{base_url}").replace(path, "{base_url}")
        # Nor half a character, which no gateway takes: the rollout would stay open.
        return plain_text(": ".join(filter(None, (type(error).__name__, text)))[:200])

    async def _run(
        self, task: Task, started: Mapping[str, Any], mark: Mapping[str, Any], channel: str
    ) -> dict[str, Any]:
        """Run the agent; return the body of `complete_trajectory`."""
        if self._generate is not None:
            return await self._generate.run(task, started, mark, channel)
        returned = await self._agent(task, started["base_url"], started.get("api_key", "none"))
        return read_reward(self._config.agent or "", returned)

    async def _abort(
        self,
        base_url: str,
        reason: str,
        *,
        will_retry: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> str | None:
        """Return how it had ended already: CLOSED with its group, or COMPLETE by its agent; None:
        it had not. One that cannot be aborted stays open until its group's deadline."""
        body: dict[str, Any] = {"reason": reason}
        if patience_s:
            body["will_retry"] = will_retry
        try:
            answer = await self._gateway.ask(f"{base_url}/v1/abort_trajectory", body, patience_s)
        except ClosedError as closed:
            log.info("%s had ended already: %s", base_url, closed)
            return COMPLETE if isinstance(closed, CompletedError) else CLOSED
        except RolloutError as e:  # at the end of a run the gateway may be gone
            log.warning("%s could not be aborted (%s): %s", base_url, reason, e)
            return None
        return CLOSED if answer.get("outcome") == "late" else None


class WorkerHandle(Protocol):
    """Worker, as `Producer` needs it: a Ray handle from `start_workers`, or a local one."""

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]: ...

    async def ready(self) -> None: ...


class _RemoteWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        running = self._actor.run_group.remote(task, prompt_uid, n, channel, n_greedy)
        try:
            return cast(dict[str, int], await running)
        except asyncio.CancelledError:
            ray.cancel(running)  # giving up the reference alone would leave the agents running
            raise

    async def ready(self) -> None:
        give_up = time.monotonic() + RECOVERY_S
        while True:
            try:
                await self._actor.ready.remote()
                return
            except ray.exceptions.RayActorError as e:  # Ray is starting it again
                if e.actor_init_failed:
                    why = str(e).strip().splitlines()[-1]
                    raise RolloutError(f"a rollout worker cannot start: {why}") from e
                if time.monotonic() >= give_up:
                    raise RolloutError(
                        f"a rollout worker died and did not come back for {RECOVERY_S:g} s ({e})"
                    ) from e
            await asyncio.sleep(RETRY_S)


def start_workers(
    config: RolloutConfig,
    gateway_urls: Sequence[str],
    key: SecretStr | None = None,
    log_dir: Path | None = None,
    **generate: Any,
) -> list[WorkerHandle]:
    """`config.workers` actors; Ray restarts one that dies, and its groups are issued again.

    Args:
        log_dir: what they log and agents print goes to `rollout.log`, or `rollout_0.log`, …, there,
            too. It is in the run's folder.
        generate: `tokenizer_path` and `validation`, for functions of slime's form.
    """
    actor = ray.remote(RolloutWorker).options(
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
        name=None,
        scheduling_strategy="SPREAD",  # over the nodes, where there are several
    )
    if config.agent is not None:
        config = config.model_copy(update={"agent": agent_of_workers(config.agent)})
    n = config.workers
    if log_dir is not None:
        generate = {**generate, "logs": log_dir / "harness", "run_dir": log_dir.parent}
    logs = [numbered_log(log_dir, "rollout", k, n) for k in range(n)]
    return [_RemoteWorker(actor.remote(config, gateway_urls, key, log, **generate)) for log in logs]
