"""This module finds the tree that the steps of a trajectory form, so that a branch is the same
wherever one is made.

A step's parent is the longest other step whose prompt + response its prompt extends. A branch is a
path from a root to a leaf; its tokens are the leaf's prompt + response::

    s0: P0 R0        s1: P0 R0 U1 R1        s2: P0 R0 U2 R2        branches  [s0 s1]  [s0 s2]

The parent is read from the token ids: a `parent_index` that is missing or false changes nothing.
Only steps with `multi_modal_data` are joined where `parent_index` says so too, because other images
have the same placeholder ids.

Does not own the trees that others keep, by a packed step's base or by `parent_index`; they walk
theirs with `path_to_root`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from stepwell.datapool.types import Step

N = TypeVar("N")


def path_to_root(node: N, parent_of: Callable[[N], N | None]) -> list[N]:
    """The node, its parent, and so on to its root."""
    path = [node]
    while (parent := parent_of(path[-1])) is not None:
        path.append(parent)
    return path


def branches(steps: Sequence[Step]) -> list[list[int]]:
    """Root-to-leaf paths of positions in `steps`, in order of the leaves."""
    found = parents(steps)
    leaves = sorted(set(range(len(steps))) - set(found))
    return [path_to_root(leaf, found.__getitem__)[::-1] for leaf in leaves]


def parents(steps: Sequence[Step]) -> list[int | None]:
    """Return the position in `steps` of each step's parent; None for a root."""
    by_length = sorted(range(len(steps)), key=lambda i: (steps[i].n_tokens, -i))
    lengths = [steps[i].n_tokens for i in by_length]
    found: list[int | None] = []
    for step in steps:
        # A response has a token, so a parent is shorter than its child: there is no cycle.
        shorter = by_length[: bisect_right(lengths, len(step.prompt_ids))]
        found.append(next((i for i in reversed(shorter) if _continues(step, steps[i])), None))
    return found


def _continues(child: Step, parent: Step) -> bool:
    """True if the child's prompt, at least as long, starts with the parent's tokens; with images,
    the child must name the parent, too."""
    n, p = parent.n_tokens, len(parent.prompt_ids)
    prompt = child.prompt_ids
    seen_images = child.multi_modal_data is not None or parent.multi_modal_data is not None
    if seen_images and child.parent_index != parent.step_index:
        return False
    # The response first: siblings share the prompt and differ there.
    return np.array_equal(prompt[p:n], parent.response_ids) and np.array_equal(
        prompt[:p], parent.prompt_ids
    )
