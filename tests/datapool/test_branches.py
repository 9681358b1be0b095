"""The tree of a trajectory's steps: whose prompt extends whose, and which branches that makes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.branches import branches
from tests.builders import step


def test_a_step_goes_on_from_the_one_that_it_names():
    steps = [
        step([1], [2]),
        step([1, 2, 3], [4], index=1, parent_index=0),
        step([1, 2, 5], [6], index=2, parent_index=0),
        step([1, 2, 3, 4, 7], [8], index=3, parent_index=1),
        step([9], [9], index=4),
    ]
    assert branches(steps) == [[0, 2], [0, 1, 3], [4]]
    assert branches(steps[1:]) == [[1], [0, 2], [3]], "the parent of some is not among them"
    assert branches([]) == []


def test_a_step_that_names_none_is_a_root_as_is_one_that_does_not_begin_with_its_parent():
    steps = [step([1], [2]), step([7], [8], index=1, parent_index=0), step([1, 2, 3], [4], index=2)]
    assert branches(steps) == [[0], [1], [2]]


def test_steps_of_two_trajectories_have_nothing_in_common():
    steps = [step([1], [2]), step([1, 2, 3], [4], index=1, parent_index=0, uid="other")]
    assert branches(steps) == [[0], [1]]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 7)), max_size=8))
def test_every_step_is_on_a_branch_and_each_prompt_extends_what_is_before_it(tokens):
    steps = [
        step(prompt, response, index=i, parent_index=parent if parent < i else None)
        for i, (prompt, response, parent) in enumerate(tokens)
    ]
    paths = branches(steps)
    assert {i for path in paths for i in path} == set(range(len(steps)))
    leaves = [path[-1] for path in paths]
    assert leaves == sorted(set(leaves))
    for path in paths:
        for parent, child in pairwise(path):
            before = [*steps[parent].prompt_ids, *steps[parent].response_ids]
            assert list(steps[child].prompt_ids)[: len(before)] == before
