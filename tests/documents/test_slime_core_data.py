"""The document of slime's core, what it says of data: filters, rewards, debug files and train data.
Where slime is installed (`make test-slime`), its own functions give the same answers."""

from __future__ import annotations

import asyncio
import itertools
import random
from argparse import Namespace
from typing import Any

import pytest
from aiohttp import web

from stepwell.backends.slime.sample import sample_class
from stepwell.trainer.slime.filters import check_reward_nonzero_std, sort_by_reward_std
from stepwell.trainer.slime.rm_hub import async_rm, batched_async_rm
from tests.backends.slime_itself import HAS_SLIME, slime

needs_slime = pytest.mark.skipif(not HAS_SLIME, reason="make test-slime runs it, where slime is")


def rewarded(*rewards: Any) -> list[Any]:
    return [sample_class()(index=i, reward=reward) for i, reward in enumerate(rewards)]


# -- filters -------------------------------------------------------------------------------------


ARGS = Namespace(reward_key=None)


def test_a_group_whose_rewards_are_equal_is_not_kept() -> None:
    different = check_reward_nonzero_std(ARGS, rewarded(1.0, 0.0))
    equal = check_reward_nonzero_std(ARGS, rewarded(0.75, 0.75))
    assert (different.keep, different.reason) == (True, None)
    assert (equal.keep, equal.reason) == (False, "zero_std_0.8")
    by_key = Namespace(reward_key="score")
    scores = rewarded({"score": 1.0, "format": 0.0}, {"score": 1.0, "format": 1.0})
    assert not check_reward_nonzero_std(by_key, scores).keep


@pytest.mark.skipif(HAS_SLIME, reason="slime's own answer has no truth value")
def test_the_documents_filter_answers_as_a_truth_value() -> None:
    assert check_reward_nonzero_std(ARGS, rewarded(1.0, 0.0))
    assert not check_reward_nonzero_std(ARGS, rewarded(0.5, 0.5), evaluation=True)


def test_groups_that_differ_the_most_come_first_and_equals_stay_in_order() -> None:
    groups = [rewarded(0.0, 0.0), rewarded(1.0, 0.0), rewarded(0.5, 0.0), rewarded(1.0, 1.0)]
    ordered = sort_by_reward_std(ARGS, groups)
    assert [groups.index(group) for group in ordered] == [1, 2, 0, 3]


@needs_slime
def test_slimes_own_filter_answers_the_same() -> None:
    theirs = slime("rollout.filter_hub.dynamic_sampling_filters").check_reward_nonzero_std
    chance = random.Random(7)
    for n in (1, 2, 8):
        for _ in range(20):
            rewards = [chance.choice((0.0, 0.1, 0.3, 1.0)) for _ in range(n)]
            ours, other = (f(ARGS, rewarded(*rewards)) for f in (check_reward_nonzero_std, theirs))
            assert type(ours) is type(other)
            assert (ours.keep, ours.reason) == (bool(other.keep), other.reason)


# -- rewards -------------------------------------------------------------------------------------


def answered(response: str, label: Any = "4", **given: Any) -> Any:
    return sample_class()(prompt="2 + 2?", response=response, label=label, **given)


def by_type(rm_type: str | None, path: str | None = None) -> Namespace:
    return Namespace(rm_type=rm_type, custom_rm_path=path, reward_key=None)


RESPONSES = (
    "So it is \\boxed{4}.",
    "So it is \\boxed{5}.",
    "</think>\\boxed{4}",
    "</think>\\boxed{3}",
    "Answer: 4",
    "Answer: 7",
    "nothing",
)


@pytest.mark.parametrize(
    ("rm_type", "response", "expected"),
    [
        ("math", "So it is \\boxed{4}.", 1),
        ("math", "So it is \\boxed{5}.", 0),
        ("deepscaler", "</think>\\boxed{4}", 1),
        ("deepscaler", "\\boxed{4}", 0),
        ("f1", "4", 1.0),
        ("gpqa", "The answer is B", 0.0),
        ("boxed_f1", "\\boxed{4}", 1.0),
        (" boxed_math ", "\\boxed{4}", 1),
    ],
)
async def test_a_sample_is_scored_by_the_type_of_its_reward(
    rm_type: str, response: str, expected: float
) -> None:
    label = "A" if rm_type == "gpqa" else "4"
    assert await async_rm(by_type(rm_type), answered(response, label)) == expected


async def test_dapo_says_what_it_took_for_the_answer() -> None:
    reward = await async_rm(by_type("dapo"), answered("Answer: 4"))
    assert (reward["score"], reward["acc"], reward["pred"]) == (1.0, True, "4")


async def test_the_type_of_a_samples_metadata_counts_before_that_of_the_run() -> None:
    sample = answered("Answer: 4", metadata={"rm_type": "f1"})
    assert isinstance(await async_rm(by_type("dapo"), sample), float)


@pytest.mark.parametrize("rm_type", [None, "", "ifbench_2", "boxed_remote_rm"])
async def test_a_type_that_there_is_not_is_an_error_that_names_them(rm_type: str | None) -> None:
    with pytest.raises(NotImplementedError, match=r"rm_type is .*; use one of deepscaler, dapo"):
        await async_rm(by_type(rm_type), answered("4"))


async def by_length(args: Any, sample: Any, **kwargs: Any) -> float:
    return len(sample.response) + kwargs.get("more", 0)


def at_once(args: Any, samples: list[Any], **kwargs: Any) -> list[int]:
    return [len(samples)] * len(samples)


async def test_a_function_of_ones_own_scores_a_sample_or_all_of_them() -> None:
    args = by_type("math", f"{__name__}.by_length")
    assert await async_rm(args, answered("four"), more=3) == 7
    assert await batched_async_rm(by_type("f1"), [answered("4"), answered("5")]) == [1.0, 0.0]
    batch = by_type(None, f"{__name__}.at_once")
    assert await batched_async_rm(batch, [answered("4")] * 3) == [3, 3, 3]
    own = answered("ab", custom_rm_path=f"{__name__}.by_length")
    assert await async_rm(by_type("math"), own) == 2


async def test_a_server_is_asked_again_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    async def score(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if len(bodies) % 3:
            raise web.HTTPServiceUnavailable
        return web.json_response(0.25)

    async def at_once(delay: float) -> None:
        return None

    app = web.Application()
    app.router.add_post("/score", score)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(asyncio, "sleep", at_once)
    try:
        args = by_type("remote_rm")
        args.rm_url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        assert await async_rm(args, answered("4")) == 0.25
    finally:
        await runner.cleanup()
    assert bodies == [{"prompt": "2 + 2?", "response": "4", "label": "4"}] * 3


@needs_slime
@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1"])
async def test_slimes_own_rewards_are_the_same(rm_type: str) -> None:
    theirs = slime("rollout.rm_hub").async_rm
    for response, label in itertools.product(RESPONSES, ("4", "7")):
        sample = answered(response, label)
        ours, other = [await rm(by_type(rm_type), sample) for rm in (async_rm, theirs)]
        if rm_type == "dapo":
            ours, other = ours["score"], other["score"]
        assert ours == pytest.approx(other), (response, label)
