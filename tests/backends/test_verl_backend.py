"""Batches for verl, checked without verl: rows, masks, padding, fields, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from pydantic import ValidationError

from stepwell.backends.base import build_backend
from stepwell.backends.config import TorchBackendConfig, VerlConfig
from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.verl.backend import Layout, VerlBackend, lay_out, trained_steps
from stepwell.backends.verl.feed import VerlFeed
from stepwell.backends.verl.queue import queue_rows
from stepwell.datapool import DataPoolClient, PoolConfig, client_of, start_data_pool
from stepwell.datapool.errors import LeaseExpiredError, PoolUnavailableError
from stepwell.datapool.types import (
    GREEDY,
    SUPERSEDES,
    Group,
    Lease,
    Step,
    Trajectory,
    VersionSpan,
)
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.config import AdvantageConfig
from tests.backends.random_groups import random_groups, steps_of
from tests.builders import step

HAS_VERL = importlib.util.find_spec("verl") is not None


def scored(
    prompt: list[int], response: list[int], uid: str = "t", index: int = 0, **fields: Any
) -> Step:
    """A Step whose log-probs show which token they are of; the first of a trajectory is scored."""
    values = {
        "rollout_log_probs": [-float(t) for t in response],
        "reward": 1.0 if index == 0 else None,
    }
    return step(prompt, response, uid, index, **values | fields)


def branched() -> list[Step]:
    """P0 = 1 2, R0 = 3 4; a tool says 5, then R1 = 6; and a branch: tool 7 8, R2 = 9."""
    return [
        scored([1, 2], [3, 4]),
        scored([1, 2, 3, 4, 5], [6], index=1, parent_index=0),
        scored([1, 2, 3, 4, 7, 8], [9], index=2, parent_index=0),
    ]


def laid_out(steps: list[Step], config: VerlConfig | None = None, **more: Any) -> Layout:
    backend = VerlBackend(config)
    return lay_out(backend.rows(steps, **more), backend.config)


def test_a_branch_is_a_row_whose_prompt_ends_where_its_training_begins() -> None:
    x = laid_out(branched()).tensors
    assert x["prompts"].tolist() == [[0, 0, 0, 0, 1, 2], [1, 2, 3, 4, 7, 8]]
    assert x["responses"].tolist() == [[3, 4, 5, 6], [9, 0, 0, 0]]
    assert x["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert x["input_ids"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9, 0, 0, 0]]  # fmt: skip  # noqa: E501
    assert x["attention_mask"].tolist() == [[0] * 4 + [1] * 6, [1] * 7 + [0] * 3]
    # As verl counts them: 0 before, the last one again behind.
    assert x["position_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 2, 3, 4, 5], [*range(7), 6, 6, 6]]
    assert x["rollout_log_probs"].tolist() == [[-3, -4, 0, -6], [-9, 0, 0, 0]]


def test_a_row_per_step_when_asked_for() -> None:
    x = laid_out(branched(), VerlConfig(rows="step")).tensors
    assert x["responses"].tolist() == [[3, 4], [6, 0], [9, 0]]
    assert x["response_mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert x["prompts"][1].tolist() == [0, 1, 2, 3, 4, 5]


def test_every_row_has_its_trajectorys_reward_at_its_last_token() -> None:
    steps = [*branched(), scored([1, 2], [5], uid="other", reward=-0.5)]
    x = laid_out(steps)
    assert x.tensors["rm_scores"].tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [-0.5, 0, 0, 0]]
    assert x.non_tensors["uid"].tolist() == ["p"] * 3
    assert x.non_tensors["session_id"].tolist() == [0, 0, 1]
    assert x.non_tensors["output_index"].tolist() == [0, 1, 0]
    assert x.non_tensors["__num_turns__"].tolist() == [6, 6, 2]


def test_not_scored_is_no_column_and_never_zero() -> None:
    assert "rm_scores" not in laid_out([scored([1], [2], reward=None)]).tensors
    with pytest.raises(BatchError, match="'b' has no reward"):
        laid_out([scored([1], [2]), scored([1], [2], uid="b", reward=None)])


def test_unknown_log_probs_are_masked_and_counted_and_never_a_trained_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = scored([1, 2, 5], [3], index=1, parent_index=0, rollout_log_probs=None)
    alone = laid_out([unknown]).tensors
    assert "rollout_log_probs" not in alone
    assert alone["response_mask"].tolist() == [[1]]
    x = laid_out([scored([1], [2]), unknown]).tensors
    assert x["rollout_log_probs"].tolist() == [[-2, 0, 0]]
    assert x["response_mask"].tolist() == [[1, 0, 0]]
    assert "masked 1 of 2 steps" in caplog.text


def test_versions_come_from_the_spans_of_the_rows_own_steps() -> None:
    spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 2))
    steps = [scored([1], [2, 3], policy_version=3, version_spans=spans)]
    steps += [scored([1, 2, 3], [4], index=1, parent_index=0, policy_version=6)]
    x = laid_out(steps).non_tensors
    assert (x["min_global_steps"].tolist(), x["max_global_steps"].tolist()) == ([3], [6])


def test_the_tasks_fields_are_where_verls_rewards_look() -> None:
    task = {"data_source": "gsm8k", "answer": "7", "extra_info": {"split": "train"}}
    of_data = {"data_source": "gsm8k", "answer": "7", "metadata": {"split": "train"}}
    for metadata in (task, {"task": task}, {"task": of_data}):
        x = laid_out([scored([1], [2])], tasks={"p": metadata}).non_tensors
        assert x["data_source"].tolist() == ["gsm8k"]
        assert x["reward_model"][0] == {"style": "rule", "ground_truth": "7"}
        assert x["extra_info"][0]["split"] == "train"
        assert x["extra_info"][0]["steps"] == [{"step_index": 0, "start": 0, "end": 1}]


@pytest.mark.parametrize("odd", ["text", ["a list"], 5])
def test_what_agents_send_with_a_group_keeps_no_batch_from_being_laid_out(odd: object) -> None:
    for metadata in ({"metadata": odd, "extra_info": odd}, {"task": odd, "metadata": odd}):
        x = laid_out([scored([1], [2])], tasks={"p": metadata}).non_tensors
        assert x["extra_info"][0]["steps"] == [{"step_index": 0, "start": 0, "end": 1}]


def test_one_temperature_is_meta_and_several_are_a_column() -> None:
    hot = scored([1], [2], uid="b", metadata={"sampling_params": {"temperature": 0.5}})
    assert laid_out([scored([1], [2])]).meta_info == {"temperature": 1.0, "global_token_num": [2]}
    x = laid_out([scored([1], [2]), hot])
    assert x.tensors["temperature"].tolist() == [1.0, 0.5]
    assert "temperature" not in x.meta_info


def test_steps_of_two_temperatures_share_no_row() -> None:
    hot = {"sampling_params": {"temperature": 0.5}}
    x = laid_out([scored([1], [2]), scored([1, 2], [3], index=1, metadata=hot)]).tensors
    assert x["responses"].tolist() == [[2], [3]]
    assert x["temperature"].tolist() == [1.0, 0.5]


def test_columns_go_to_the_tokens_they_are_of_under_verls_names() -> None:
    flat = torch.tensor([1.0, 2, 3, 4])
    columns = {
        "advantages": flat,
        "prox_log_probs": -flat,
        "weights": flat / 4,
        "coef": torch.tensor([0.5, 0.5, 1.0, 2.0]),
    }
    x = laid_out(branched(), columns=columns).tensors
    assert x["advantages"].tolist() == [[1, 2, 0, 3], [4, 0, 0, 0]]
    assert x["old_log_probs"].tolist() == [[-1, -2, 0, -3], [-4, 0, 0, 0]]
    assert x["rollout_is_weights"].tolist() == [[0.125, 0.25, 0, 0.75], [2, 0, 0, 0]]


def test_what_is_masked_is_out_of_the_mask_and_leaves_no_nan_behind() -> None:
    columns = {
        "advantages": torch.tensor([1.0, torch.nan, 3, 4]),
        "mask": torch.tensor([1.0, 0, 1, 1]),
        "weights": torch.tensor([1.0, 1, 0, 1]),
    }
    x = laid_out(branched(), columns=columns).tensors
    # A weight of 0 is no mask: the token stays in verl's denominators.
    assert x["response_mask"].tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]
    assert x["advantages"].tolist() == [[1, 0, 0, 3], [4, 0, 0, 0]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantage": torch.zeros(4)}, "column 'advantage' is unknown"),
        ({"advantages": torch.zeros(3)}, r"has shape \(3,\) for 4 response tokens"),
    ],
)
def test_a_column_that_cannot_be_placed_is_refused(columns: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        laid_out(branched(), columns=columns)


@pytest.mark.parametrize(("limit", "longest"), [("prompt_length", 6), ("response_length", 4)])
def test_widths_are_verls_and_nothing_is_cut(limit: str, longest: int) -> None:
    name = "prompts" if limit == "prompt_length" else "responses"
    wide = laid_out(branched(), VerlConfig.model_validate({limit: 10})).tensors
    assert wide[name].shape == (2, 10)
    with pytest.raises(BatchError, match=f"has a row of {longest} tokens and {limit} is"):
        laid_out(branched(), VerlConfig.model_validate({limit: longest - 1}))


def test_no_key_is_both_and_every_row_has_a_prompt() -> None:
    for rows in ("merged", "step"):
        x = laid_out(steps_of(random_groups()), VerlConfig.model_validate({"rows": rows}))
        n = len(x.tensors["prompts"])
        assert not x.tensors.keys() & x.non_tensors.keys()
        assert not (x.tensors.keys() | x.non_tensors.keys()) & x.meta_info.keys()
        assert {len(v) for v in (*x.tensors.values(), *x.non_tensors.values())} == {n}
        assert x.tensors["attention_mask"][:, : x.tensors["prompts"].shape[1]].any(-1).all()
        assert x.meta_info["global_token_num"] == x.tensors["attention_mask"].sum(-1).tolist()


# --- experts and images ---------------------------------------------------------------------------


def test_a_token_is_routed_as_when_it_was_first_computed() -> None:
    """The engine records all but the last token; a later call may have routed a prefix anew."""
    first = np.full((3, 2, 1), 1)
    later = np.full((5, 2, 1), 2)
    steps = [
        scored([1, 2], [3, 4], routed_experts=first),
        scored([1, 2, 3, 4, 5], [6], index=1, parent_index=0, routed_experts=later),
    ]
    (row,) = VerlBackend().rows(steps)
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 0]
    x = lay_out([row], VerlConfig(prompt_length=4)).tensors["routed_experts"]
    assert (x.dtype, x.shape) == (torch.int16, (1, 8, 2, 1))
    assert x[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 2, 2, 0]


def test_routing_is_replayed_for_all_or_none() -> None:
    routed = scored([1], [2], routed_experts=np.zeros((1, 2, 1)))
    with pytest.raises(BatchError, match=r"'b'\[0\] has no routed_experts"):
        laid_out([routed, scored([1], [2], uid="b")])


@pytest.mark.parametrize("shape", [(2, 2, 1), (5, 2, 1), (3, 2)])
def test_a_record_that_leaves_tokens_unrouted_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="routed_experts has shape"):
        laid_out([scored([1, 2], [3, 4], routed_experts=np.zeros(shape))])


def test_images_are_refused_by_name() -> None:
    with pytest.raises(BatchError, match=r"has multi_modal_data; verl is given text and"):
        laid_out([scored([7], [2], multi_modal_data={"images": [[0.5]]})])


# --- TransferQueue rows ---------------------------------------------------------------------------


def test_queue_rows_are_named_tagged_and_unpadded() -> None:
    steps = [
        *(
            scored(s.prompt_ids.tolist(), s.response_ids.tolist(), "t", s.step_index,
                 parent_index=s.parent_index, prompt_uid="a_b", policy_version=4)
            for s in branched()
        ),
        scored([1, 2], [5], uid="u", prompt_uid="a_b", policy_version=6),
    ]  # fmt: skip
    rows = queue_rows(VerlBackend().rows(steps))
    assert rows.keys == ["a%5Fb_0_0", "a%5Fb_0_1", "a%5Fb_1_0"]
    # verl splits its keys: the uid at the first `_`, session and output at the last two.
    assert {key.split("_")[0] for key in rows.keys} == set(rows.prompts)
    assert rows.prompts["a%5Fb"] == {"is_prompt": True, "status": "finished", "global_steps": 5}
    assert rows.tags[1] == {
        "status": "success",
        "prompt_len": 6,
        "response_len": 1,
        "seq_len": 7,
        "global_steps": 5,
        "min_global_steps": 4,
        "max_global_steps": 4,
    }
    fields = rows.fields[0]
    assert fields["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert fields["loss_mask"].tolist() == fields["response_mask"].tolist() == [1, 1, 0, 1]
    assert fields["rm_scores"].tolist() == [0, 0, 0, 1]
    assert fields["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (fields["uid"], fields["num_turns"]) == ("a%5Fb", 6)
    assert len({frozenset(f) for f in rows.fields}) == 1


def test_different_uids_never_share_a_key() -> None:
    uids = ["a_b", "a%5Fb", "a%b", "ab"]
    steps = [scored([1], [2], uid=f"t{u}", prompt_uid=u) for u in uids]
    assert len(set(queue_rows(VerlBackend().rows(steps)).prompts)) == len(uids)


def test_rows_of_two_temperatures_cannot_be_queued() -> None:
    hot = scored([1], [2], uid="b", metadata={"sampling_params": {"temperature": 0.5}})
    with pytest.raises(BatchError, match=r"temperatures \[0.5, 1.0\]"):
        queue_rows(VerlBackend().rows([scored([1], [2]), hot]))


# --- the backend ----------------------------------------------------------------------------------


@pytest.mark.skipif(HAS_VERL, reason="verl is installed here; the default suite runs it")
def test_without_verl_one_error_names_the_remedy() -> None:
    backend = build_backend("verl")
    with pytest.raises(BackendConfigError, match=r"verl.* not installed: pip install 'verl>"):
        backend.convert(branched())
    assert "pip install" in (VerlBackend.missing() or "")


def test_stepwells_own_loop_is_told_that_verl_has_one() -> None:
    with pytest.raises(BackendConfigError, match="verl runs its own loop"):
        build_backend("verl", TorchBackendConfig(), "model")


def test_impossible_batches_and_options_are_refused() -> None:
    with pytest.raises(BatchError, match="no steps"):
        VerlBackend().rows([])
    with pytest.raises(BatchError, match="'t' is in group 'p' and in 'q'"):
        VerlBackend().rows([scored([1], [2]), scored([1, 2], [3], index=1, prompt_uid="q")])
    with pytest.raises(ValidationError, match="tree"):
        VerlConfig.model_validate({"rows": "tree"})


def test_a_greedy_baseline_rollout_is_not_trained() -> None:
    sampled, greedy = scored([1], [2]), scored([1], [3], uid="greedy")
    group = Group(
        "p",
        (
            Trajectory("t", "p", (sampled,)),
            Trajectory("greedy", "p", (greedy,), metadata={GREEDY: True}),
        ),
    )
    assert trained_steps([group]) == [sampled]


@pytest.mark.parametrize("unseen", [0, 2], ids=["first", "last"])
def test_a_reply_that_nobody_saw_is_no_row_and_its_trajectory_keeps_its_reward(unseen: int) -> None:
    """Tries of one request say 3 and 4. The agent went on from 3."""
    lost = scored([1, 2], [4], index=unseen, reward=0.5)
    read = scored([1, 2], [3], index=1 if unseen == 0 else 0, reward=None)
    on = scored(
        [1, 2, 3, 5],
        [6],
        index=2 if unseen == 0 else 1,
        parent_index=read.step_index,
        reward=0.25,
        metadata={SUPERSEDES: [unseen]},
    )
    steps = sorted([lost, read, on], key=lambda s: s.step_index)
    trained = trained_steps([Group("p", (Trajectory("t", "p", tuple(steps)),))])
    x = laid_out(trained).tensors
    assert x["responses"].tolist() == [[3, 5, 6]]
    assert x["response_mask"].tolist() == [[1, 0, 1]]
    assert x["rm_scores"].tolist() == [[0, 0, 0.75]]


# --- the feed, with a real pool -------------------------------------------------------------------


@pytest.fixture
def pool(cluster: str) -> Iterator[DataPoolClient]:
    handle = start_data_pool(PoolConfig(), name=uuid.uuid4().hex)
    yield client_of([handle])
    ray.kill(handle)


class Recording(VerlBackend):
    """The real backend up to where it needs verl."""

    def convert_groups(self, groups: Any, *, columns: Any = None, pictures: Any = None) -> Any:
        tasks = {g.prompt_uid: g.metadata for g in groups}
        return lay_out(self.rows(trained_steps(groups), columns=columns, tasks=tasks))


async def fill(pool: DataPoolClient, groups: list[Group]) -> None:
    for group in groups:
        n = len(group.trajectories)
        await pool.open_group(group.prompt_uid, n, metadata=group.metadata)
        await pool.submit_steps(group.steps)


async def counts(pool: DataPoolClient) -> dict[str, int]:
    statistics = await pool.get_statistics("train")
    return {name: statistics["groups"][name] for name in ("ready", "leased", "acked")}


async def test_a_feed_yields_every_group_once_and_acks_on_demand(pool: DataPoolClient) -> None:
    groups = random_groups(6)
    await fill(pool, groups)
    seen: list[str] = []
    async with VerlFeed(pool, Recording(), groups=2, timeout_s=0) as feed:
        async for batch in feed:
            seen += dict.fromkeys(batch.non_tensors["uid"])
            assert set(batch.non_tensors["data_source"]) <= {"task0", "task1"}
            if len(seen) == 4:
                assert await counts(pool) == {"ready": 2, "leased": 4, "acked": 0}
                await feed.ack()
                assert await counts(pool) == {"ready": 2, "leased": 0, "acked": 4}
    assert sorted(seen) == [g.prompt_uid for g in groups]
    # The last batch was never acked: it is served again.
    assert await counts(pool) == {"ready": 2, "leased": 0, "acked": 4}


async def test_advantages_of_ones_own_fit_a_group_with_a_reply_that_nobody_saw(
    pool: DataPoolClient,
) -> None:
    read = scored([1, 2], [3], reward=0.5)
    on = scored([1, 2, 3, 5], [6], index=1, parent_index=0, metadata={SUPERSEDES: [2]})
    lost = scored([1, 2], [4, 4], index=2)
    await fill(pool, [Group("p", (Trajectory("t", "p", (read, on, lost)),))])
    await pool.complete_trajectory("t")

    def columns(groups: Any) -> Any:
        return compute_advantages(groups, AdvantageConfig()).columns

    async with VerlFeed(pool, Recording(), groups=1, timeout_s=0, columns=columns) as feed:
        (batch,) = [batch async for batch in feed]
    assert batch.tensors["responses"].tolist() == [[3, 5, 6]]
    assert batch.tensors["advantages"].tolist() == [[0.5, 0, 0.5]]


async def test_a_loop_that_fails_gives_its_batches_back_at_once(pool: DataPoolClient) -> None:
    await fill(pool, random_groups(2))

    async def train() -> None:
        async with VerlFeed(pool, Recording(), groups=1, timeout_s=0) as feed:
            async for _ in feed:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await train()
    assert await counts(pool) == {"ready": 2, "leased": 0, "acked": 0}


async def test_a_batch_whose_lease_ran_out_is_not_yielded_again(pool: DataPoolClient) -> None:
    await fill(pool, random_groups(3))
    async with VerlFeed(pool, Recording(), groups=1, timeout_s=0) as feed:
        batches = aiter(feed)
        seen = set((await anext(batches)).non_tensors["uid"])
        await pool.release_leases()  # as if it had run out
        seen |= set((await anext(batches)).non_tensors["uid"])
        assert len(seen) == 2
        await feed.ack()
        assert await counts(pool) == {"ready": 1, "leased": 0, "acked": 2}
        await feed.ack()


async def test_a_batch_that_another_consumer_took_does_not_pass_for_trained(
    pool: DataPoolClient,
) -> None:
    await fill(pool, random_groups(2))
    async with VerlFeed(pool, Recording(), groups=1, timeout_s=0) as feed:
        batches = aiter(feed)
        await anext(batches)
        await pool.release_leases()  # as if it had run out
        assert await pool.lease_batch() is not None  # of another process
        await anext(batches)
        with pytest.raises(LeaseExpiredError, match="1 of 2 groups ran out, and another consumer"):
            await feed.ack()
        # The other one was acked all the same, and a second ack has nothing to complain of.
        assert await counts(pool) == {"ready": 0, "leased": 1, "acked": 1}
        await feed.ack()


class OneLease:
    """A pool of one lease that says when it was renewed, and is down at first."""

    def __init__(self) -> None:
        self.renewed = asyncio.Event()
        self.asked = 0

    async def lease_batch(self, *_: Any) -> Lease:
        return Lease("lease", "train", tuple(random_groups(1)), 0.0)

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        assert (lease_id, lease_s) == ("lease", 0.2)
        self.asked += 1
        if self.asked == 1:
            raise PoolUnavailableError("the actor restarts")
        self.renewed.set()
        return 0.0

    async def ack(self, lease_id: str) -> None: ...

    async def nack(self, lease_id: str, reason: str = "") -> None: ...

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = "train") -> None: ...


async def test_a_held_batch_is_renewed_while_the_loop_works_on_it() -> None:
    pool = OneLease()
    async with VerlFeed(pool, Recording(), groups=1, lease_s=0.2) as feed:
        async for _ in feed:
            await asyncio.wait_for(pool.renewed.wait(), 60)
            break
