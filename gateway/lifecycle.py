"""This module opens, closes, scores and deletes trajectories and groups over HTTP.

Owns: these handlers and the models of their bodies. Does not own: calls (`routes.py`), paths and
who may use them (`endpoints.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Annotated, Any, TypeAlias
from urllib.parse import unquote

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from stepwell.datapool.config import Described
from stepwell.datapool.errors import (
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import MAX_REWARD, OWNER
from stepwell.gateway.access import Named, Principal, caller_of, quoted, uid_of
from stepwell.gateway.config import MOST_OF_A_GROUP
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.errors import (
    PermissionDeniedError,
    RequestError,
    UnknownItemError,
)
from stepwell.gateway.http_protocol import DirectCall
from stepwell.gateway.replicas import FORGET_HEADER
from stepwell.gateway.services import Services, services_of
from stepwell.gateway.trajectory.store import NotKept
from stepwell.gateway.trajectory.trajectory import more_rewards
from stepwell.gateway.web import OrjsonResponse, parse_object

MAX_LABEL, MAX_CORRECTION = 256, 65_536
"""Characters of a feedback, which stays in memory with its trajectory."""
RECORDED_HEADER = "x-stepwell-recorded"
"""`false` on answers of which no Step is stored."""
MAX_TAGS, MAX_STEP_REWARDS = 1024, 16_384
Name: TypeAlias = Annotated[str, Field(min_length=1)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False, strict=True)]
"""A number as JSON has it: neither true nor "1.5"."""
StepReward: TypeAlias = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
StepIndex: TypeAlias = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class Body(Described, Params):
    """Base of the bodies of the gateway's own endpoints."""


def _no_owner(metadata: dict[str, Any]) -> dict[str, Any]:
    if OWNER in metadata:
        raise ValueError(f"{OWNER} is set by the gateway; leave it out")
    return metadata


Metadata: TypeAlias = Annotated[dict[str, Any], AfterValidator(_no_owner)]


class Opening(Body):
    prompt_uid: Name | None = None
    """Id of the group; null: made here. Given, a repeated request is of the same group."""
    channel: Name | None = None
    metadata: Metadata = Field(default_factory=dict)
    tags: Annotated[list[Name], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=MAX_TAGS
    )
    """Names to delete it by (`DataPoolClient.delete`, `stepwell data delete`), and to select it."""


class InitTrajectory(Opening):
    trajectory_uid: Name | None = None
    """null: made here. Given, a repeated request is the same trajectory."""
    attempt: int = Field(default=0, ge=0, lt=2**31, strict=True)


class DeclareGroup(Opening):
    n: int = Field(ge=1, le=MOST_OF_A_GROUP, strict=True)
    """Trajectories, which are opened and handed out."""
    deadline_s: Number | None = Field(default=None, gt=0)
    """Seconds after which it is served with what is complete; null: as the pool's channel says."""


class RegisterTrajectory(Body):
    channel: Name | None = None
    metadata: Metadata = Field(default_factory=dict)


class CompleteTrajectory(Body):
    reward: StepReward | None = None
    step_rewards: Annotated[list[StepReward | None], Field(fail_fast=True)] = Field(
        default=[], max_length=MAX_STEP_REWARDS
    )
    """Rewards of its steps, in order; null: the step has none of its own. `reward` is added to the
    last step's."""
    metadata: Metadata = Field(default_factory=dict)


class CompleteByName(CompleteTrajectory):
    trajectory_uid: Name | None = None
    """Id from a reply's header `x-stepwell-trajectory`; null: that of the caller's key."""


class Reward(Body):
    trajectory_uid: Name
    """Id from a reply's header `x-stepwell-trajectory`."""
    reward: StepReward
    step_index: StepIndex | None = None
    """Index of the step whose own reward it is; null: it is the outcome reward."""


class Feedback(Body):
    """A person's feedback on a reply. At least one of score, label and correction."""

    step_index: StepIndex | None = None
    """Index of the reply's step; null: the trajectory as a whole, and its last reply."""
    score: StepReward | None = None
    """Replaces the reward."""
    label: Name | None = Field(default=None, max_length=MAX_LABEL)
    """Becomes one of its tags."""
    correction: Name | None = Field(default=None, max_length=MAX_CORRECTION)
    """The right reply, kept with the given one (`marks.corrections`): for SFT, or as a pair."""


class FeedbackByName(Feedback):
    trajectory_uid: Name
    """Id from a reply's header `x-stepwell-trajectory`."""


class AbortTrajectory(Body):
    reason: Name
    will_retry: bool = Field(default=False, strict=False)


async def init_trajectory(request: Request, body: InitTrajectory) -> Response:
    """Open a trajectory: its names, the base URL and the key for its agent."""
    services, caller = services_of(request), caller_of(request)
    uid = body.trajectory_uid or uuid.uuid4().hex
    prompt_uid = body.prompt_uid or f"prompt-{uid}"
    _check_names(trajectory_uid=uid, prompt_uid=prompt_uid)
    opening = {"channel": body.channel, "attempt": body.attempt, "metadata": body.metadata}
    replica = await services.replicas.place(body.trajectory_uid)
    address = await _hand_out(request, replica, uid, prompt_uid, body.tags, caller, **opening)
    return OrjsonResponse({**address, "prompt_uid": prompt_uid})


async def declare_group(request: Request, body: DeclareGroup) -> Response:
    """Declare a group and open its trajectories."""
    services, caller = services_of(request), caller_of(request)
    if caller.is_bound:
        raise PermissionDeniedError(
            "this API key is for one trajectory; declare groups with an agent or admin key"
        )
    caller.check_channel(body.channel)
    prompt_uid = body.prompt_uid or f"group-{uuid.uuid4().hex}"
    _check_names(prompt_uid=prompt_uid)
    caller.check_owner(prompt_uid, None, "group")
    channel = body.channel or services.groups.channel(prompt_uid, caller.channel)
    pool, ask = services.pool, services.pool_access.ask
    owned = body.metadata if caller.owner is None else {**body.metadata, OWNER: caller.owner}
    opened = pool.open_group(
        prompt_uid,
        body.n,
        body.deadline_s,
        metadata=owned,
        channel=channel,
        timeout_s=services.pool_access.room_s,
        everywhere=True,  # the keys of its trajectories are handed out
    )
    await ask(opened, room=True)
    if body.tags:
        await ask(pool.mark(prompt_uid, channel=channel, tags=body.tags))
    uids = [services.keys.member(prompt_uid, i) for i in range(body.n)]
    replicas = [await services.replicas.place(uid) for uid in uids]
    addresses = await asyncio.gather(
        *(
            _hand_out(request, replica, uid, prompt_uid, (), caller, channel=channel, metadata={})
            for replica, uid in zip(replicas, uids, strict=True)
        )
    )
    return OrjsonResponse({"prompt_uid": prompt_uid, "trajectories": addresses})


def _check_names(**names: str) -> None:
    for name, value in names.items():
        if value in (".", ".."):
            raise RequestError(
                f"{name} is {value!r}; it is part of a URL, so use no bare dots", name
            )


async def _hand_out(
    request: Request,
    replica: int | None,
    uid: str,
    prompt_uid: str,
    tags: Sequence[str],
    caller: Principal,
    **opening: Any,
) -> dict[str, str]:
    """Open a trajectory and tag it; what its agent needs to know.

    Args:
        replica: that is to serve it; None: there is only this one.
    """
    services = services_of(request)
    addresses, trajectories = services.replicas, services.trajectories
    if replica is not None and trajectories.known(uid) is not None:
        replica = addresses.index
    if replica in (None, addresses.index):
        trajectory = trajectories.get(uid, prompt_uid, caller)
    else:
        trajectory = trajectories.elsewhere(uid, prompt_uid, caller)
    await trajectory.open(caller, **opening)
    if tags and trajectory.unrecorded is None:
        mark = services.pool.mark(trajectory_uid=uid, channel=trajectory.channel, tags=list(tags))
        await services.pool_access.ask(mark)
    if replica is None:
        origin = services.config.public_url or services.hosts.origin(request.scope)
    else:
        origin = addresses.origin(replica)
    return {
        "trajectory_uid": uid,
        "base_url": f"{origin.rstrip('/')}/{quoted(uid)}/{quoted(prompt_uid)}",
        "api_key": services.keys.issue(uid, prompt_uid),
    }


async def register_trajectory(request: Request, body: RegisterTrajectory) -> Response:
    """Open the trajectory of this URL before its first call, which would open it, too."""
    services, caller = services_of(request), caller_of(request)
    trajectory_uid, prompt_uid = _by_url(request)
    caller.check_channel(body.channel)
    trajectory = services.trajectories.get(trajectory_uid, prompt_uid, caller)
    await trajectory.open(caller, channel=body.channel, metadata=body.metadata)
    uids = {"trajectory_uid": trajectory_uid, "prompt_uid": prompt_uid}
    return OrjsonResponse({**uids, "channel": trajectory.channel})


async def abort_trajectory(request: Request, body: AbortTrajectory) -> Response:
    """The trajectory failed: it is never trained, and never has a reward of 0 for it."""
    services, caller = services_of(request), caller_of(request)
    trajectory_uid, prompt_uid = _by_url(request)
    trajectory = services.trajectories.get(trajectory_uid, prompt_uid, caller, is_to_end=True)
    outcome = await trajectory.abort(body.reason, will_retry=body.will_retry, caller=caller)
    return OrjsonResponse({"trajectory_uid": trajectory_uid, "outcome": outcome})


async def complete_trajectory(services: Services, call: DirectCall) -> None:
    """The trajectory is over, with its reward; null leaves it to the trainer's reward function."""
    body, caller = CompleteTrajectory.read(parse_object(call.content)), call.caller
    if call.url is None:
        raise RuntimeError("the path names no trajectory")
    trajectory = services.trajectories.get(*call.url, caller, is_to_end=True)
    with services.outcomes.counts_refusal():
        outcome = await trajectory.complete(body.reward, body.metadata, body.step_rewards, caller)
    call.respond(await completed(services, caller, trajectory.uid, outcome))


def _by_url(request: Request) -> Named:
    return uid_of(request.path_params["trajectory_uid"]), uid_of(request.path_params["prompt_uid"])


async def complete_by_name(request: Request, body: CompleteByName) -> Response:
    """For agents that know a trajectory by the header of a reply, or by its key."""
    services, caller = services_of(request), caller_of(request)
    of_key = None if caller.trajectory is None else caller.trajectory[0]
    if (name := body.trajectory_uid or of_key) is None:
        raise RequestError(
            "trajectory_uid is missing; send what a reply's header x-stepwell-trajectory says, or "
            "the trajectory's own api_key",
            "trajectory_uid",
        )
    how = (body.reward, body.metadata, caller, body.step_rewards)
    return await _by_name(services, caller, name, services.outcomes.complete, *how)


async def completed(
    services: Services, caller: Principal, uid: str, outcome: TrajectoryOutcome | SubmitOutcome
) -> Response:
    """The answer to a completion or reward; one that is not kept is told why, and counted. The
    outcome is `aborted` where no Step is stored: there was no call, or calls were served
    unrecorded."""
    answer: dict[str, Any] = {"trajectory_uid": uid, "outcome": outcome}
    if outcome == "late":
        services.outcomes.not_kept["late"] += 1
        why = await services.outcomes.why_late(uid, caller)
        return OrjsonResponse({**answer, "accepted": False, "reason": why})
    if outcome == "aborted":
        services.outcomes.not_kept["unrecorded"] += 1
        why = "no step of it is stored: it made no call, or its calls were not recorded"
        answer |= {"recorded": False, "accepted": False, "reason": why}
        return OrjsonResponse(answer, headers={RECORDED_HEADER: "false"})
    return OrjsonResponse(answer)


async def late_reward(request: Request, body: Reward) -> Response:
    """The reward of a trajectory, open or complete, or of one step, until its group is leased; then
    the answer says `accepted: false`, and why."""
    services, caller = services_of(request), caller_of(request)
    how = (body.reward, caller, body.step_index)
    return await _by_name(services, caller, body.trajectory_uid, services.outcomes.score, *how)


async def feedback_by_name(request: Request, body: FeedbackByName) -> Response:
    """Store a person's feedback on a trajectory or one of its replies, until its group is
    leased."""
    services, caller = services_of(request), caller_of(request)
    return await _keep(services, caller, body.trajectory_uid, body)


async def feedback(request: Request, body: Feedback) -> Response:
    """Store a person's feedback on this trajectory or one of its replies, until its group is
    leased."""
    services, caller = services_of(request), caller_of(request)
    trajectory_uid, _ = _by_url(request)
    return await _keep(services, caller, trajectory_uid, body)


async def _keep(services: Services, caller: Principal, uid: str, body: Feedback) -> Response:
    if body.score is None and body.label is None and body.correction is None:
        raise RequestError("the feedback is empty; send a score, a label or a correction", None)
    how = (body.step_index, body.score, body.label, body.correction, caller)
    return await _by_name(services, caller, uid, services.outcomes.feedback, *how, refused="late")


async def _by_name(
    services: Services,
    caller: Principal,
    name: str,
    do: Callable[..., Awaitable[TrajectoryOutcome | SubmitOutcome]],
    *how: Any,
    refused: NotKept = "closed",
) -> Response:
    """Do it to the trajectory of this name, which may be percent-encoded as headers are.

    Args:
        refused: as what it counts where the trajectory is closed.
    """
    uids = tuple(dict.fromkeys((name, unquote(name))))
    if caller.is_bound and caller.trajectory is not None:
        uids = tuple(uid for uid in uids if uid == caller.trajectory[0])
        if not uids:
            caller.check_trajectory(name)
    for uid in uids:
        is_open = services.trajectories.known(uid) is not None
        try:
            with services.outcomes.counts_refusal(refused):
                outcome = await do(uid, *how)
        except UnknownTrajectoryError:
            continue
        except TrajectoryClosedError as e:
            if is_open or refused == "late":
                raise
            raise TrajectoryConflictError(str(e)) from e  # it has another outcome already
        except StepIndexError as e:
            raise more_rewards(e) from e
        return await completed(services, caller, uid, outcome)
    raise UnknownItemError(
        f"trajectory_uid is {name!r:.200}, which no channel knows; send what a reply's header "
        "x-stepwell-trajectory says",
        "trajectory_uid",
    )


async def delete_trajectory(request: Request) -> Response:
    """Delete it from the pool, and from the memory of all replicas. An admin key deletes it with
    its group; its own key deletes it alone, and its group goes on without it."""
    services, caller = services_of(request), caller_of(request)
    trajectory_uid = uid_of(request.path_params["trajectory_uid"])
    own = caller.trajectory
    if own[0] != trajectory_uid if own is not None else caller.access != "admin":
        raise PermissionDeniedError(
            "this API key does not delete this trajectory; use an admin key "
            "(gateway.admin_keys), or the trajectory's own"
        )
    if FORGET_HEADER in request.headers:
        _forget(services, (trajectory_uid,))
        return OrjsonResponse({"deleted": [], "leased": []})
    with_group = caller.access == "admin" and not caller.is_bound
    return OrjsonResponse(await forget_trajectory(services, trajectory_uid, with_group=with_group))


async def forget_trajectory(services: Services, uid: str, *, with_group: bool) -> dict[str, Any]:
    """Delete a trajectory in the pool, here and at the other replicas; what went, and what was
    leased.

    Raises:
        ReplicaUnavailableError: it is deleted, but a replica may still know it.
        FileDeletionError: it is deleted, but a file could not be written anew.
    """
    pool = services.pool
    deleting = pool.delete(uid) if with_group else pool.delete_trajectory(uid)
    deleted = await services.pool_access.ask(deleting)
    uids = dict.fromkeys((uid, *deleted.trajectories, *deleted.leased))
    try:
        await _forget_everywhere(services, uids)
    finally:  # a replica that is away keeps nothing in files
        gone = await services.file_deletions.delete(uids, with_groups=with_group)
    if siblings := [each for each in gone if each not in uids]:
        await _forget_everywhere(services, siblings)
    return {"deleted": deleted.trajectories, "leased": deleted.leased}


async def _forget_everywhere(services: Services, uids: Collection[str]) -> None:
    _forget(services, uids)
    told = {f"/v1/trajectories/{quoted(each)}": services.keys.issue(each, "-") for each in uids}
    await services.replicas.have_forgotten(told)


def _forget(services: Services, uids: Collection[str]) -> None:
    for uid in uids:
        if (trajectory := services.trajectories.known(uid)) is not None:
            trajectory.forget()
    services.responses.store.forget(uids)
    services.calls.prompts.forget()
    services.known_bodies.forget()
    if services.pictures is not None:
        services.pictures.forget()
    services.engine.connections.ids_json.clear()
