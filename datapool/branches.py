"""This module walks the tree that the steps of a trajectory form, so that a branch is the same
wherever one is made.

A step's parent is the one that its `parent_index` names: the gateway declares it, and where nobody
does, the pool finds it once, when it stores the step. A branch is a path from a root to a leaf; its
tokens are the leaf's prompt + response::

    s0: P0 R0        s1: P0 R0 U1 R1        s2: P0 R0 U2 R2        branches  [s0 s1]  [s0 s2]

A step may come before the parent that it names, so the tokens are looked at here: a step whose
prompt does not begin with its parent's is a root. No other parent is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.datapool.types import Step


def branches(steps: Sequence[Step]) -> list[list[int]]:
    """Root-to-leaf paths of positions in `steps`, in order of the leaves."""
    found = parents(steps)
    paths: list[list[int]] = []
    for leaf in sorted(set(range(len(steps))) - set(found)):
        path, parent = [leaf], found[leaf]
        while parent is not None:
            path.append(parent)
            parent = found[parent]
        paths.append(path[::-1])
    return paths


def parents(steps: Sequence[Step]) -> list[int | None]:
    """Return the position in `steps` of each step's parent; None for a root. The steps may be of
    several trajectories."""
    at = {(step.trajectory_uid, step.step_index): i for i, step in enumerate(steps)}
    found: list[int | None] = []
    for step in steps:
        index = step.parent_index
        i = None if index is None else at.get((step.trajectory_uid, index))
        found.append(i if i is not None and _continues(step, steps[i]) else None)
    return found


def _continues(child: Step, parent: Step) -> bool:
    """True if the child's prompt begins with the parent's tokens and pictures."""
    n, p = parent.n_tokens, len(parent.prompt_ids)
    prompt = child.prompt_ids
    return (
        len(prompt) >= n
        # The response first: siblings share the prompt and differ there. As bytes: several times
        # faster than comparing arrays of this size.
        and prompt[p:n].tobytes() == parent.response_ids.tobytes()
        and prompt[:p].tobytes() == parent.prompt_ids.tobytes()
        and (
            child.pictures == parent.pictures  # in text: both have none
            or tuple(p for p in child.pictures if p.at < n) == parent.pictures
        )
    )
