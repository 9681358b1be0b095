"""Steps as bytes and back: what was submitted is what is served, and is stored once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool import Lease, Step, VersionSpan
from stepwell.datapool.codec import (
    Base,
    PackedGroup,
    PackedLease,
    PackedStep,
    PackedTrajectory,
    decoder,
    encoder,
    pack,
    unpack,
)
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.ops import PutPictures
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import TokenIds
from tests.builders import step_of
from tests.datapool.conftest import SyncPool

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
FEW_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
"""So few that prompts extend each other by accident, too."""
INTEGERS = st.integers(-(2**63), 2**64 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
ARRAYS = st.sampled_from(
    [
        np.zeros((2, 3), np.int8),
        np.arange(4, dtype=np.float64).reshape(2, 1, 2),
        np.array([], np.int16),
    ]
)


@st.composite
def trees(draw: st.DrawFn) -> list[Step]:
    """The steps of one trajectory: chains, branches, and parents that are none."""
    tokens = draw(st.sampled_from([TOKENS, FEW_TOKENS]))
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        prompt = draw(tokens)
        if parent is not None and draw(st.sampled_from([True, True, True, False])):
            before, known = steps[parent].n_tokens, steps[parent].pictures
            prompt = [*steps[parent].prompt_ids, *steps[parent].response_ids, *prompt]
            if draw(st.booleans()):
                parent = None  # extends it, and does not say so
        else:
            before, known = 0, ()
        pictures = draw(_pictures(known, before, len(prompt)))
        steps.append(draw(_step(index, parent, prompt, draw(tokens), pictures)))
    return steps


@st.composite
def _pictures(
    draw: st.DrawFn, known: tuple[Picture, ...], start: int, end: int
) -> tuple[Picture, ...]:
    """Draw the pictures of the tokens before `start`, and perhaps new ones."""
    known = draw(st.sampled_from([known, known, known, ()]))  # another prompt with the same ids
    new = []
    while start < end and draw(st.sampled_from([True, False, False])):
        at = draw(st.integers(start, end - 1))
        n = draw(st.integers(1, end - at))
        new.append(Picture(draw(st.sampled_from("ab")) * 64, 28, 28 * n, at, n))
        start = at + n
    return (*known, *new)


@st.composite
def _step(
    draw: st.DrawFn,
    index: int,
    parent: int | None,
    prompt: list[int],
    response: list[int],
    pictures: tuple[Picture, ...],
) -> Step:
    n = len(response)
    version = draw(st.integers(0, 5))
    spans: tuple[VersionSpan, ...] = ()
    if n > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, n - 1))
        spans = (VersionSpan(version, 0, cut), VersionSpan(version + 1, cut, n))
    log_probs = st.lists(st.floats(-1e3, 0, width=32), min_size=n, max_size=n)
    return Step(
        prompt_ids=ids(prompt),
        response_ids=ids(response),
        reward=draw(st.none() | st.floats(-1e6, 1e6)),
        trajectory_uid="t",
        prompt_uid="p",
        step_index=index,
        policy_version=version,
        metadata=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        rollout_log_probs=draw(st.none() | log_probs),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
        parent_index=parent,
        version_spans=spans,
        multi_modal_data=draw(st.none() | st.fixed_dictionaries({"images": st.lists(ARRAYS)})),
        routed_experts=draw(st.none() | ARRAYS),
        pictures=pictures,
    )


def ids(values: Sequence[int]) -> TokenIds:
    return np.array(values, np.int32)


def base_of(step: Step) -> Base:
    return Base.of(step, pack(step).header.crc)


def pack_all(steps: Sequence[Step], whole: bool) -> list[PackedStep]:
    """Each relative to the parent that it names, as a client packs them, or whole."""
    bases = [None if whole or (k := s.parent_index) is None else base_of(steps[k]) for s in steps]
    return [pack(step, base) for step, base in zip(steps, bases, strict=True)]


def sent(packed: Sequence[PackedStep]) -> list[tuple[str, str, PackedStep]]:
    return [("t", "p", step) for step in packed]


def unpacked(packed: Sequence[PackedStep]) -> list[Step]:
    return unpack(PackedTrajectory("t", "p", list(packed)))


def with_pictures_of(steps: Sequence[Step]) -> SyncPool:
    """A pool that has the pictures of these steps, and nothing else."""
    pool = SyncPool()
    pictures = {p.digest: b"png" for step in steps for p in step.pictures}
    pool.apply(PutPictures("t", pictures, prompt_uid="p"), 0.0)
    return pool


def arrived(lease: PackedLease | None) -> Lease:
    """The lease as its consumer gets it."""
    got: PackedLease = decoder(PackedLease).decode(encoder.encode(lease))
    return got.unpack()


def assert_exact(steps: Sequence[Step], unpacked: Sequence[Step]) -> None:
    assert list(unpacked) == list(steps)
    for sent, got in zip(steps, unpacked, strict=True):
        for f in fields(Step):
            assert type(getattr(got, f.name)) is type(getattr(sent, f.name)), f.name
        for column in (got.prompt_ids, got.response_ids, got.rollout_log_probs):
            assert column is None or not column.flags.writeable
        if sent.rollout_log_probs is not None and got.rollout_log_probs is not None:
            # Equal is not enough: -0.0 == 0.0.
            assert got.rollout_log_probs.tobytes() == sent.rollout_log_probs.tobytes()


@given(trees(), st.booleans(), st.randoms(use_true_random=False))
def test_what_is_packed_comes_back_exactly_in_any_order(
    steps: list[Step], whole: bool, rng: Any
) -> None:
    packed = pack_all(steps, whole)
    order = list(range(len(steps)))
    rng.shuffle(order)
    assert_exact([steps[i] for i in order], unpacked([packed[i] for i in order]))


@given(trees(), st.booleans())
def test_a_lease_arrives_as_what_was_submitted(steps: list[Step], whole: bool) -> None:
    trajectory = PackedTrajectory("t", "p", pack_all(steps, whole), {"m": 1}, 2)
    group = PackedGroup("p", [trajectory], 3, {"k": [1]}, 4)
    sent = PackedLease("lease-1", "train", [group], 5.0)
    lease = arrived(sent)
    assert lease == sent.unpack()
    (got,) = lease.groups
    assert (got.prompt_uid, got.n_rollouts, got.metadata, got.delivery) == ("p", 3, {"k": [1]}, 4)
    assert (got.trajectories[0].metadata, got.trajectories[0].attempt) == ({"m": 1}, 2)
    assert_exact(steps, got.trajectories[0].steps)
    assert_exact(steps, lease.steps)


@given(trees(), st.booleans(), st.integers(0, 40))
def test_the_pool_serves_what_was_submitted_however_it_was_packed(
    steps: list[Step], whole: bool, cut: int
) -> None:
    pool = with_pictures_of(steps)
    packed = sent(pack_all(steps, whole))
    answers = pool.apply_steps(packed[:cut], now=0.0) + pool.apply_steps(packed[cut:], now=0.0)
    assert answers == ["accepted"] * len(steps)
    # The other form of the same content is the same content.
    assert pool.apply_steps(sent(pack_all(steps, not whole)), now=0.0) == ["duplicate"] * len(steps)
    pool.complete_trajectory("t", now=0.0)
    lease = arrived(pool.lease_packed(now=0.0))
    *rest, last = lease.steps
    assert last.is_last
    *expected, expected_last = with_parents(steps)
    assert_exact(expected, rest)
    assert last.parent_index == expected_last.parent_index
    assert last.response_ids.tolist() == steps[-1].response_ids.tolist()


@given(trees())
def test_a_parent_that_is_not_named_or_false_is_found_once(steps: list[Step]) -> None:
    pool = with_pictures_of(steps)
    pool.apply_steps(steps, now=0.0)
    pool.complete_trajectory("t", now=0.0)
    served = arrived(pool.lease_packed(now=0.0)).steps
    assert [s.parent_index for s in served] == [s.parent_index for s in with_parents(steps)]


def test_a_step_that_comes_before_its_parent_keeps_the_parent_that_it_names() -> None:
    pool = SyncPool()
    first = step_of("t", "p", 0, prompt_ids=[1])
    second = step_of("t", "p", 1, prompt_ids=[1, 4, 5, 3], parent_index=0)
    assert pool.apply_steps([second, first], now=0.0) == ["accepted"] * 2
    pool.complete_trajectory("t", now=0.0)
    assert [s.parent_index for s in arrived(pool.lease_packed(now=0.0)).steps] == [None, 0]


@given(trees())
def test_any_changed_column_is_a_conflict(steps: list[Step]) -> None:
    pool = with_pictures_of(steps)
    pool.apply_steps(steps, now=0.0)
    last = steps[-1]
    values = {f.name: getattr(last, f.name) for f in fields(Step)}
    for name, value in {
        "prompt_ids": [*last.prompt_ids, 1],
        "reward": 0.5 if last.reward is None else None,
        "finish_reason": "stop" if last.finish_reason is None else None,
        "metadata": {**last.metadata, "another": 1},
        "routed_experts": np.ones(1) if last.routed_experts is None else None,
        "pictures": [Picture("c" * 64, 28, 28, 0, 1)],
    }.items():
        (answer,) = pool.apply_steps([Step(**{**values, name: value})], now=0.0)
        assert type(answer).__name__ == "StepConflictError", name


def with_parents(steps: Sequence[Step]) -> list[Step]:
    """The steps as a pool stores them: the parent of each is the longest step before it that its
    prompt begins with, unless it names another one of which this is true. Pictures may differ where
    ids do not."""

    def begins(step: Step, parent: Step) -> bool:
        n = parent.n_tokens
        same_ids = step.prompt_ids[:n].tolist() == parent.token_ids.tolist()
        return same_ids and tuple(p for p in step.pictures if p.at < n) == parent.pictures

    def has_more(step: Step) -> bool:
        more = step.multi_modal_data, step.routed_experts
        return bool(step.version_spans or step.pictures) or any(value is not None for value in more)

    stored: list[Step] = []
    for step in steps:
        parent = step.parent_index
        if parent is None or not begins(step, steps[parent]):
            found = [] if has_more(step) else [s for s in stored if begins(step, s)]
            found = [s for s in found if not has_more(s)]
            longest = min(found, key=lambda s: (-s.n_tokens, s.step_index), default=None)
            parent = None if longest is None else longest.step_index
        stored.append(replace(step, parent_index=parent))
    return stored


def chain(n_rollouts: int, n_steps: int, prompt: int, new: int, response: int) -> list[list[Step]]:
    """Rollouts of one group; each step extends the one before it."""
    rollouts = []
    for k in range(n_rollouts):
        tokens = list(range(prompt))
        steps = []
        for i in range(n_steps):
            reply = [k * 1000 + i] * response
            step = Step(
                prompt_ids=ids(tokens),
                response_ids=ids(reply),
                trajectory_uid=f"t{k}",
                prompt_uid="p",
                step_index=i,
                parent_index=i - 1 if i else None,
            )
            steps.append(step)
            tokens = [*tokens, *reply, *range(new)]
        rollouts.append(steps)
    return rollouts


def test_prompts_of_a_chain_are_views_of_one_array() -> None:
    (steps,) = chain(1, 5, prompt=100, new=20, response=30)
    got = unpacked(pack_all(steps, whole=False))
    longest = got[-1]
    for step in got[:-1]:
        assert np.shares_memory(step.prompt_ids, longest.prompt_ids)
        assert np.shares_memory(step.response_ids, longest.prompt_ids)


def test_branches_share_the_trunk_in_bytes_and_not_each_others_tokens() -> None:
    trunk = Step(prompt_ids=ids([1, 2]), response_ids=ids([3]), trajectory_uid="t", prompt_uid="p")
    left, right = (
        Step(
            prompt_ids=ids([1, 2, 3, new]),
            response_ids=ids([new]),
            trajectory_uid="t",
            prompt_uid="p",
            step_index=i,
            parent_index=0,
        )
        for i, new in ((1, 7), (2, 8))
    )
    packed = pack_all([trunk, left, right], whole=False)
    assert [(p.header.base, p.header.n_new) for p in packed] == [(None, 0), (0, 1), (0, 1)]
    assert unpacked(packed) == [trunk, left, right]


@pytest.mark.parametrize("whole", [False, True])
def test_the_common_prompt_is_stored_once_and_each_step_only_what_is_new(whole: bool) -> None:
    n_rollouts, n_steps, prompt, new, response = 8, 4, 1000, 30, 40
    pool = SyncPool()
    for steps in chain(n_rollouts, n_steps, prompt, new, response):
        packed = pack_all(steps, whole)
        pool.apply_steps([(steps[0].trajectory_uid, "p", step) for step in packed], now=0.0)
    ids = prompt + n_rollouts * (n_steps * response + (n_steps - 1) * new)
    extra = sum(
        len(step.payload) - len(step.tokens)
        for t in pool.channels["train"].records.trajectories.values()
        for step in t.steps
    )
    assert pool.channels["train"].memory_bytes == 4 * ids + extra
    assert extra < 64 * n_rollouts * n_steps


def test_a_parent_that_is_none_is_packed_whole() -> None:
    first = Step(prompt_ids=ids([1, 2]), response_ids=ids([3]), trajectory_uid="t", prompt_uid="p")
    liar = Step(
        prompt_ids=ids([1, 2, 4]),
        response_ids=ids([5]),
        trajectory_uid="t",
        prompt_uid="p",
        step_index=1,
        parent_index=0,
    )
    packed = pack(liar, base_of(first))
    assert (packed.header.base, packed.prompt) == (None, liar.prompt_ids.tobytes())
    assert unpacked([pack(first), packed])[1] == liar


def test_what_cannot_be_carried_is_refused_with_the_name_of_the_step() -> None:
    step = Step(
        prompt_ids=ids([1]),
        response_ids=ids([2]),
        trajectory_uid="t",
        prompt_uid="p",
        metadata={"f": lambda: 0},
    )
    with pytest.raises(InvalidStepError, match=r"step 't'\[0\].*cannot be carried"):
        pack(step)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 2),
        date(2026, 1, 2),
        uuid.UUID(int=1),
        Decimal("1.5"),
        {1, 2},
        np.datetime64("2026-01-02"),
        {(1, 2): 3},
        threading.Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_by_name(make_step, value):
    with pytest.raises(InvalidStepError, match=r"cannot be carried .*not supported"):
        pack(make_step("t", metadata={"at": [value]}))
