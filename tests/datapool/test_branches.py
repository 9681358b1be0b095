"""The tree of a trajectory's steps: whose prompt extends whose, and which branches that makes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.branches import branches, path_to_root
from tests.builders import step


def test_a_step_goes_on_from_the_longest_other_one_that_its_prompt_extends():
    steps = [
        step([1], [2]),
        step([1, 2, 3], [4], index=1),
        step([1, 2, 5], [6], index=2),
        step([1, 2, 3, 4, 7], [8], index=3),
        step([9], [9], index=4),
    ]
    assert branches(steps) == [[0, 2], [0, 1, 3], [4]]
    assert branches([]) == []


def test_a_parent_index_is_not_asked():
    steps = [step([1], [2]), step([7], [8], index=1, parent_index=0), step([1, 2, 3], [4], index=2)]
    assert branches(steps) == [[1], [0, 2]]


def test_of_two_steps_with_the_same_tokens_the_first_has_the_children():
    steps = [step([1], [2]), step([1], [2], index=1), step([1, 2, 3], [4], index=2)]
    assert branches(steps) == [[1], [0, 2]]


def test_steps_with_images_are_joined_only_where_their_producer_says_so():
    images = {"multi_modal_data": {"image": b"1"}}
    first = step([1], [2], **images)
    assert branches([first, step([1, 2, 3], [4], index=1)]) == [[0], [1]]
    assert branches([first, step([1, 2, 3], [4], index=1, parent_index=0)]) == [[0, 1]]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=8))
def test_every_step_is_on_a_branch_and_each_prompt_extends_what_is_before_it(tokens):
    steps = [step(*pair, index=i) for i, pair in enumerate(tokens)]
    paths = branches(steps)
    assert {i for path in paths for i in path} == set(range(len(steps)))
    leaves = [path[-1] for path in paths]
    assert leaves == sorted(set(leaves))
    for path in paths:
        for parent, child in pairwise(path):
            before = [*steps[parent].prompt_ids, *steps[parent].response_ids]
            assert list(steps[child].prompt_ids)[: len(before)] == before


def test_a_path_leads_from_a_node_to_its_root():
    assert path_to_root(5, {5: 3, 3: 0}.get) == [5, 3, 0]
    assert path_to_root(0, {5: 3, 3: 0}.get) == [0]
