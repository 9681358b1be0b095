"""This package says which ready groups are served, in what order, which are refused, and why.

Owns the rules: people's marks, orders and filters, built in or named by dotted path. Owns no group,
no queue and no clock: a channel describes a group as a `GroupInfo`, asks, and acts on the answer; a
dry run asks the same and acts on nothing. Everything here is pure; one group costs O(its
trajectories)::

    ready ─► gate ───────────► filters ──────────────► order ─────► served
    group    marks of people   None   serve            smallest
             Hold if nothing   Drop   refill           key first,
             is left           Hold   wait for news    then oldest

`Drop` removes the group, counted with its reason, and frees its credit, so the producer generates
another one: DAPO's dynamic sampling (arXiv 2503.14476), as a stream instead of a loop of
generation batches. `Hold` keeps it, unserved, until its marks or rewards change.

Names in `SelectionConfig`; an argument goes in brackets, `all_correct(0.9)`:

    order         fifo · freshest
    filters       zero_variance · scored · all_correct(1.0) · all_wrong(0.0)

What verl calls it: `algorithm.filter_groups` is `filters: [zero_variance]`; a group of one is kept,
as there. `max_num_gen_batches` needs nothing here, since drops are counted by reason. slime's words
and functions, which the trainer asks: `trainer/slime/filters.py`.

Modules: `groups` (what rules see and answer), `built_in` (rules that have names), `rules` (those of
one channel, in their order), `dry_run`.
"""

from stepwell.datapool.selection.built_in import DOUBTFUL, NOT_TRAINABLE, STALE, UNSCORED
from stepwell.datapool.selection.dry_run import Decision, DryRun, dry_run
from stepwell.datapool.selection.info import (
    UNMARKED,
    Drop,
    Filter,
    GroupInfo,
    Hold,
    Marks,
    TrajectoryInfo,
    Verdict,
)
from stepwell.datapool.selection.rules import Selection

__all__ = [
    "DOUBTFUL",
    "NOT_TRAINABLE",
    "STALE",
    "UNMARKED",
    "UNSCORED",
    "Decision",
    "Drop",
    "DryRun",
    "Filter",
    "GroupInfo",
    "Hold",
    "Marks",
    "Selection",
    "TrajectoryInfo",
    "Verdict",
    "dry_run",
]
