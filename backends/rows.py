"""Row forms: which sequences go through the model so that every response token is trained once.

A step is trained on its response, given its prompt. As one row per step, a prompt that repeats
the turns before it is computed again and again. Where a prompt extends prompt + response
of an earlier step of its trajectory, one row serves both, since attention is causal::

    steps        s0: P0 R0          s1: P0 R0 U1 R1        s2: P0 R0 U2 R2   (another branch)
    step rows    [P0 R0]            [P0 R0 U1 R1]          [P0 R0 U2 R2]
    merged rows                     [P0 R0 U1 R1]          [P0 R0 U2 R2]
    trained                             ^^    ^^                     ^^      (R0 once)

Whether a prompt extends a step is read from the token ids; `parent_index` is no proof and its
absence no objection. A history that was rewritten in between simply starts a row of its own.

Owns: rows and micro-batches, in NumPy. Does not own: the model, the flat columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from datapool.types import Step, TokenIds


@dataclass(frozen=True, slots=True)
class Segment:
    """The response of one step within a row: tokens `[start, start + length)`."""

    step: int
    """Index into the batch's steps."""
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One sequence for the model and the responses that are trained on it."""

    ids: TokenIds
    segments: tuple[Segment, ...]
    """By position; never empty, and every step is in exactly one row of the batch."""

    @property
    def n_inputs(self) -> int:
        """Tokens to feed: the last response token predicts nothing that is trained."""
        return self.segments[-1].end - 1


def build_rows(steps: Sequence[Step], form: Literal["merged", "step"]) -> list[Row]:
    """The rows of `steps`; each step's response is in exactly one segment."""
    parents: list[int | None] = _parents(steps) if form == "merged" else [None] * len(steps)
    inner = {p for p in parents if p is not None}
    done: set[int] = set()
    rows = []
    for leaf in range(len(steps)):
        if leaf in inner:
            continue
        chain = []
        node: int | None = leaf
        # An ancestor that is done was trained on a sibling's row, and so were its own ancestors.
        while node is not None and node not in done:
            chain.append(node)
            node = parents[node]
        done.update(chain)
        rows.append(Row(_tokens(steps[leaf]), tuple(_segment(steps, i) for i in reversed(chain))))
    return rows


def _segment(steps: Sequence[Step], index: int) -> Segment:
    return Segment(index, len(steps[index].prompt_ids), len(steps[index].response_ids))


def _tokens(step: Step) -> TokenIds:
    return np.concatenate([step.prompt_ids, step.response_ids])


def _parents(steps: Sequence[Step]) -> list[int | None]:
    """For each step, the longest other step of its trajectory that its prompt extends."""
    by_trajectory: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        by_trajectory.setdefault(step.trajectory_uid, []).append(i)
    parents: list[int | None] = [None] * len(steps)
    for members in by_trajectory.values():
        longest_first = sorted(members, key=lambda i: -steps[i].n_tokens)
        for i in members:
            # A parent is strictly shorter than its child, so there is no cycle to fall into.
            parents[i] = next((j for j in longest_first if _extends(steps[i], steps[j])), None)
    return parents


def _extends(child: Step, parent: Step) -> bool:
    n, p = parent.n_tokens, len(parent.prompt_ids)
    prompt = child.prompt_ids
    return (
        len(prompt) >= n
        # The response first: siblings share the prompt and differ there. As bytes: several times
        # faster than comparing arrays of this size.
        and prompt[p:n].tobytes() == parent.response_ids.tobytes()
        and prompt[:p].tobytes() == parent.prompt_ids.tobytes()
    )


def select(rows: Sequence[Row], steps: Collection[int]) -> list[Row]:
    """The rows that train `steps` only; what lies behind the last of them is cut off."""
    kept = []
    for row in rows:
        segments = tuple(s for s in row.segments if s.step in steps)
        if segments:
            kept.append(Row(row.ids[: segments[-1].end], segments))
    return kept


def micro_batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Rows of similar length together, at most `budget` padded tokens (one row may exceed it).

    Longest first: what runs out of memory does so at once.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda r: -r.n_inputs):
        if batch and batch[0].n_inputs * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
