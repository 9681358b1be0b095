"""References to pictures, and the comparison of prompts that hold some."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from stepwell.datapool import Step, Trajectory
from stepwell.datapool.branches import branches
from stepwell.datapool.codec import Base, PackedTrajectory, pack, unpack
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    read_trained,
    trained_path,
    write_trained,
)
from stepwell.datapool.pictures import Picture, shadow_ids
from tests.builders import step_of

PAD = 99
"""Placeholder id."""
RED, BLUE = "a" * 64, "b" * 64


def picture(digest: str, at: int, n: int = 4) -> Picture:
    return Picture(digest, 28, 28 * n, at, n)


def step(index: int, prompt: list[int], *pictures: Picture, **more: Any) -> Step:
    return step_of("t", "p", index, prompt_ids=prompt, pictures=pictures, **more)


def test_prompts_of_equal_ids_have_equal_shadows_only_if_their_pictures_are_equal() -> None:
    ids = [7, *[PAD] * 4, 8, *[PAD] * 4]
    red, blue = [picture(RED, 1), picture(BLUE, 6)], [picture(BLUE, 1), picture(RED, 6)]
    shadow = shadow_ids(ids, red)
    assert shadow.dtype == np.int64
    assert shadow.tolist() == shadow_ids(np.array(ids, np.int32), red).tolist()
    assert shadow.tolist() != shadow_ids(ids, blue).tolist()
    assert shadow[[0, 5]].tolist() == [7, 8]
    assert (shadow[1:5] < 0).all()
    assert (shadow[1:5] == shadow[1]).all()
    # The value is the picture's, wherever it stands; the ids given stay as they are.
    assert shadow[1] == shadow_ids(ids, blue)[6]
    assert ids[1] == PAD
    assert shadow_ids(ids, ()).tolist() == ids


def test_one_long_picture_is_not_two_short_ones() -> None:
    ids = [PAD] * 4
    two = [picture(RED, 0, 2), picture(RED, 2, 2)]
    assert shadow_ids(ids, two).tolist() != shadow_ids(ids, [picture(RED, 0)]).tolist()


def test_a_cut_inside_a_picture_has_its_value_to_the_end() -> None:
    whole = shadow_ids([7, *[PAD] * 4, 8], [picture(RED, 1)])
    assert shadow_ids([7, PAD, PAD], [picture(RED, 1)]).tolist() == whole[:3].tolist()


@pytest.mark.parametrize(
    ("pictures", "why"),
    [
        (("red",), "pass a Picture"),
        ("red", "pass a sequence"),
        ((Picture("A" * 64, 28, 28, 0, 1),), "64 hex digits"),
        ((Picture("red", 28, 28, 0, 1),), "64 hex digits"),
        ((Picture(RED, 0, 28, 0, 1),), "pass integers"),
        ((Picture(RED, 28, 28, 0, 0),), "pass integers"),
        ((Picture(RED, 28, 28, -1, 1),), "pass integers"),
        ((Picture(RED, 28, True, 0, 1),), "pass integers"),
        ((picture(RED, 4, 3),), "inside the 6 prompt tokens"),
        ((picture(RED, 0, 3), picture(RED, 2, 3)), "none overlapping"),
        ((picture(RED, 3, 1), picture(RED, 1, 1)), "in order of `at`"),
    ],
)
def test_a_malformed_picture_is_one_error_that_names_it(pictures: Any, why: str) -> None:
    with pytest.raises(InvalidStepError, match=f"pictures.*{why}"):
        step_of("t", "p", prompt_ids=[PAD] * 6, pictures=pictures)


def test_a_step_with_pictures_is_the_same_after_every_way() -> None:
    sent = step(0, [7, *[PAD] * 4], picture(RED, 1))
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert Step.from_dict(sent.to_dict()) == sent
    assert "pictures" not in step(0, [7]).to_dict()
    assert unpack(PackedTrajectory("t", "p", [pack(sent)])) == [sent]
    other = step(0, [7, *[PAD] * 4], picture(BLUE, 1))
    assert other != sent
    assert fields(Step)[-1].name == "pictures"


def turns(n: int) -> list[Step]:
    """A linear conversation with a picture a turn."""
    steps: list[Step] = []
    prompt: list[int] = []
    pictures: list[Picture] = []
    for i in range(n):
        pictures.append(Picture(f"{i:064x}", 28, 112, len(prompt) + 1, 4))
        prompt = [*prompt, i, *[PAD] * 4]
        parent = i - 1 if i else None
        steps.append(step(i, prompt, *pictures, parent_index=parent, response_ids=[i]))
        prompt = [*prompt, i]
    return steps


def test_a_packed_step_carries_the_pictures_of_its_new_tokens_alone() -> None:
    steps = turns(5)
    packed, base = [], None
    for each in steps:
        packed.append(pack(each, base))
        base = Base.of(each, packed[-1].crc)
    assert [each.pictures for each in packed] == [[each.pictures[-1]] for each in steps]
    assert unpack(PackedTrajectory("t", "p", packed)) == steps
    assert unpack(PackedTrajectory("t", "p", packed[::-1])) == steps[::-1]


def test_other_pictures_of_the_same_ids_are_another_base() -> None:
    first, second = turns(2)
    red = Base.of(first, pack(first).crc)
    repainted = step(0, first.prompt_ids.tolist(), picture(RED, 1), response_ids=[0])
    blue = Base.of(repainted, pack(repainted).crc)
    assert pack(second, red).prompt is None
    assert pack(second, blue).prompt is not None
    assert blue.crc != red.crc
    assert branches([first, second]) == [[0, 1]]
    assert branches([repainted, second]) == [[0], [1]]


def test_a_picture_that_a_base_would_cut_is_sent_whole() -> None:
    first = step(0, [PAD] * 2, response_ids=[PAD])
    second = step(1, [PAD] * 5, picture(RED, 2, 2))
    for base in (Base.of(first, pack(first).crc), Base(0, 12, pack(first).crc)):
        assert pack(second, base).prompt is not None


def test_a_record_of_what_was_trained_names_each_picture_once(tmp_path: Any) -> None:
    steps = tuple(turns(3))
    trained = TrainedTrajectory(Trajectory("t", "p", steps), ({}, {}, {}))
    write_trained(tmp_path, 1, {}, [trained], most=1 << 20)
    (got,) = read_trained(tmp_path, 1)
    assert got.trajectory.steps == steps
    written = trained_path(tmp_path, 1).read_text()
    assert [written.count(each.pictures[-1].digest) for each in steps] == [1, 1, 1]
