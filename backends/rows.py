"""Row forms: which sequences go through the model so that every response token is trained once.

A step is trained on its response, given its prompt. As one row per step, a prompt that repeats
the turns before it is computed again and again. Where a prompt extends prompt + response
of its parent, one row serves both, since attention is causal::

    steps        s0: P0 R0          s1: P0 R0 U1 R1        s2: P0 R0 U2 R2   (another branch)
    step rows    [P0 R0]            [P0 R0 U1 R1]          [P0 R0 U2 R2]
    merged rows                     [P0 R0 U1 R1]          [P0 R0 U2 R2]
    trained                             ^^    ^^                     ^^      (R0 once)
    tree                                [P0 R0 U1 R1 U2 R2], attention by branch: P0 R0 once

A step's parent is the one that it names (`datapool/branches.py`), if its prompt begins with that
one's tokens. A history that was rewritten in between simply starts a row of its own.

The tree form has the merged rows and computes what they begin with once per micro-batch, also
across the trajectories of a group, whose prompt is the same, and across groups (`tree.py`).

Owns: rows and micro-batches, in NumPy. Does not own: the model, the flat columns, the packing of
a micro-batch (`model.py`, `tree.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import parents
from stepwell.datapool.pictures import Picture, shadow_ids
from stepwell.datapool.types import Step, TokenIds

RowForm: TypeAlias = Literal["step", "merged", "tree"]
Layout: TypeAlias = RowForm | Literal["packed"]
"""Layout of a micro-batch: step and merged rows are padded on the right, unless they are packed
end to end; a tree has what they share once."""
Compared: TypeAlias = npt.NDArray[Any]
"""Token ids, in which pictures are told apart (`shadow_ids`)."""


@dataclass(frozen=True, eq=False, slots=True)
class TokenRow:
    """One sequence for the model and the steps that are trained on it: the prompt and the response
    of each are its first tokens, `[0, step.n_tokens)`."""

    ids: TokenIds
    """Up to the last response that is trained."""
    steps: tuple[int, ...]
    """Indices into the batch's steps, the shortest first; never empty, and every step is in exactly
    one row of the batch."""
    pictures: tuple[Picture, ...] = ()
    """All that stand in `ids`."""

    @property
    def compared(self) -> Compared:
        """`ids` as rows are compared: two pictures of one size have the same ids."""
        return shadow_ids(self.ids, self.pictures) if self.pictures else self.ids

    @property
    def n_inputs(self) -> int:
        """Tokens to feed: the last response token predicts nothing that is trained."""
        return len(self.ids) - 1


def build_rows(steps: Sequence[Step], form: RowForm) -> list[TokenRow]:
    """The rows of `steps`; each step is in exactly one."""
    of: list[int | None] = [None] * len(steps) if form == "step" else parents(steps)
    inner = {parent for parent in of if parent is not None}
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
            node = of[node]
        done.update(chain)
        step = steps[leaf]
        rows.append(TokenRow(step.token_ids, tuple(reversed(chain)), step.pictures))
    return rows


def select(
    rows: Sequence[TokenRow], steps: Sequence[Step], wanted: Collection[int]
) -> list[TokenRow]:
    """The rows that train the `wanted` of the batch's `steps` only; what lies behind the last of
    them is cut off."""
    kept = []
    for row in rows:
        own = tuple(i for i in row.steps if i in wanted)
        if own:
            last = steps[own[-1]]
            kept.append(TokenRow(row.ids[: last.n_tokens], own, last.pictures))
    return kept


def micro_batches(
    rows: Sequence[TokenRow], budget: int, form: Layout = "merged"
) -> Iterator[list[TokenRow]]:
    """Rows in micro-batches of at most `budget` computed tokens (one row may exceed it).

    Padded forms: rows of similar length together, longest first, since what runs out of memory
    does so at once. Tree: rows that share the most together.
    """
    if form == "tree":
        yield from _by_prefix(rows, budget)
    else:
        yield from _by_length(rows, budget, form)


def computed_tokens(rows: Sequence[TokenRow], form: Layout = "merged") -> int:
    """Tokens that go through the model for a micro-batch of `rows`, padding included."""
    if form == "packed":
        return sum(row.n_inputs for row in rows)
    if form != "tree":
        return len(rows) * max(row.n_inputs for row in rows)
    return sum(own for _, _, own in _tree_costs(rows))


def _by_length(rows: Sequence[TokenRow], budget: int, form: Layout) -> Iterator[list[TokenRow]]:
    batch: list[TokenRow] = []
    tokens = 0
    for row in sorted(rows, key=lambda r: -r.n_inputs):
        padded = row.n_inputs if form == "packed" or not batch else batch[0].n_inputs
        if batch and tokens + padded > budget:
            yield batch
            batch, tokens, padded = [], 0, row.n_inputs
        batch.append(row)
        tokens += padded
    if batch:
        yield batch


def _by_prefix(rows: Sequence[TokenRow], budget: int) -> Iterator[list[TokenRow]]:
    """Neighbours in tree order. A full micro-batch is cut where neighbours share the least, in
    its second half: what is shared across the cut is computed twice."""
    batch: list[tuple[TokenRow, int, int]] = []
    tokens = 0
    for row, shared, own in _tree_costs(rows):
        batch.append((row, shared, own))
        tokens += own
        while tokens > budget and len(batch) > 1:
            cut = _cheapest_cut(batch, budget)
            yield [row for row, _, _ in batch[:cut]]
            # The first row that is left has no neighbour to share with any more.
            first = batch[cut][0]
            batch = [(first, 0, first.n_inputs), *batch[cut + 1 :]]
            tokens = sum(own for _, _, own in batch)
    if batch:
        yield [row for row, _, _ in batch]


def _cheapest_cut(batch: Sequence[tuple[TokenRow, int, int]], budget: int) -> int:
    """Return where to cut a micro-batch whose last row is too much: rows before the cut fit."""
    size, best = 0, len(batch) - 1
    for i, (_, shared, own) in enumerate(batch):
        if size > budget:
            break
        if i and size >= budget / 2 and shared <= batch[best][1]:
            best = i
        size += own
    return best


def _tree_costs(rows: Sequence[TokenRow]) -> Iterator[tuple[TokenRow, int, int]]:
    """(row, tokens shared with the one before, tokens of its own) in tree order."""
    fed = [row.compared[: row.n_inputs] for row in rows]
    previous: Compared | None = None
    for i in in_tree_order(fed):
        shared = 0 if previous is None else common_prefix(previous, fed[i])
        yield rows[i], shared, len(fed[i]) - shared
        previous = fed[i]


def in_tree_order(sequences: Sequence[Compared]) -> list[int]:
    """Indices in the order of a depth-first walk: each shares its longest prefix with a
    neighbour, and a sequence comes before those that extend it."""
    # Big-endian bytes sort as the ids do.
    form = ">i8" if any(sequence.itemsize == 8 for sequence in sequences) else ">i4"
    return sorted(range(len(sequences)), key=lambda i: sequences[i].astype(form).tobytes())


def common_prefix(a: Compared, b: Compared) -> int:
    """Return the number of tokens that both begin with."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
