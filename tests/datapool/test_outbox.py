"""What a client keeps of the steps it sent."""

from __future__ import annotations

from stepwell.datapool.remote.outbox import TIP_BYTES, _Parcel, _Tips
from stepwell.datapool.types import Step


def step(uid: str, index: int, n_prompt: int = 4) -> Step:
    return Step(
        prompt_ids=list(range(n_prompt + 2 * index)),
        response_ids=[n_prompt + 2 * index, n_prompt + 2 * index + 1],
        trajectory_uid=uid,
        prompt_uid="p",
        step_index=index,
        rollout_log_probs=[-0.1, -0.1],
    )


def test_a_step_is_sent_relative_to_the_one_before_it() -> None:
    tips = _Tips()
    assert tips.pack(step("a", 0), "train").base is None
    assert tips.pack(step("a", 1), "train").base == 0
    assert tips.pack(step("b", 1), "train").base is None
    assert tips.pack(step("a", 2), "val").base is None


def test_nothing_is_kept_of_a_trajectory_that_ended() -> None:
    tips = _Tips()
    for uid in ("a", "b"):
        for index in range(3):
            tips.pack(step(uid, index), "train")
    _Parcel(("complete_trajectory", ("a", 1.0, None, "train"))).pack(tips)
    assert tips.pack(step("a", 3), "train").base is None
    assert tips.pack(step("b", 3), "train").base == 2
    _Parcel(("abort_trajectory", ("a", "late", False, "train"))).pack(tips)
    _Parcel(("abort_trajectory", ("b", "gone", False, "train"))).pack(tips)
    assert (tips._n_bytes, len(tips._tokens), len(tips._indices)) == (0, 0, 0)


def test_the_longest_unused_go_first_when_there_are_too_many() -> None:
    tips = _Tips()
    n_prompt = TIP_BYTES // 4 // 3
    for uid in "abc":
        tips.pack(step(uid, 0, n_prompt), "train")
    assert tips._n_bytes <= TIP_BYTES
    assert list(tips._indices) == [("train", "b"), ("train", "c")]
