"""This module turns counts that somebody keeps anyway into Prometheus' metric families, so that
there is one place of truth and a call is never made slower by being counted twice.

    {"groups": {"drop_reasons": {"stale": 3}}}
        + Family("…_dropped", COUNTER, "…", "groups.drop_reasons.{reason}")
        ──► …_dropped_total{reason="stale"} 3

A path walks into the counts: `{label}` stands for every key of a mapping, `[label=field]` for every
item of a list, told apart by a field of it. What is not there, or None, has no sample; a counter
without labels is 0 then. `POOL` is the table of a pool's channels. Does not own the counts
(`core/accounting.py`), or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Kind: TypeAlias = Literal["counter", "gauge"]
COUNTER: Final = "counter"
GAUGE: Final = "gauge"
MOST_VALUES: Final = 64
"""Of one label: what comes after them is added up as `other`, as names may be an agent's."""
OTHER: Final = "other"
_Sample: TypeAlias = tuple[tuple[str, ...], float]


class Family(NamedTuple):
    """One metric family."""

    name: str
    """Without a counter's `_total`."""
    kind: Kind
    help: str
    path: str
    value: Callable[[Any], float] = float
    """Makes what stands at the path a number in the unit of the name."""

    @property
    def exposed(self) -> str:
        """The name that Prometheus shows."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name

    @property
    def labels(self) -> tuple[str, ...]:
        parts = [p for p in self.path.split(".") if p[:1] in "{["]
        return tuple(part.strip("{}[]").partition("=")[0] for part in parts)


def families(
    table: Iterable[Family], counts: Mapping[str, Any], most: int = MOST_VALUES
) -> Iterator[Metric]:
    """The families of `table` with their samples in `counts`, and of a label `most` values."""
    for family in table:
        kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
        metric = kind(family.name, family.help, labels=family.labels)
        found = list(_walk(counts, family.path.split(".")))
        if not found and family.kind == COUNTER and not family.labels:
            found = [((), 0)]
        for labels, value in _bounded(((labels, family.value(v)) for labels, v in found), most):
            metric.add_metric(list(labels), value)
        yield metric


def _walk(
    found: Any, parts: list[str], labels: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if found is None:
        return
    if not parts:
        yield labels, found
        return
    part, *rest = parts
    if part[0] == "{":
        for key, value in found.items():
            yield from _walk(value, rest, (*labels, str(key)))
    elif part[0] == "[":
        field = part[1:-1].partition("=")[2]
        for i, value in enumerate(found):
            yield from _walk(value, rest, (*labels, str(value[field] if field else i)))
    else:
        yield from _walk(found.get(part), rest, labels)


def _bounded(samples: Iterable[_Sample], most: int) -> Iterator[_Sample]:
    """With few values of each label."""
    known: list[set[str]] = []
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in samples:
        known += [set() for _ in labels[len(known) :]]
        for seen, label in zip(known, labels, strict=True):
            if len(seen) < most:
                seen.add(label)
        bounded = tuple(
            label if label in seen else OTHER for seen, label in zip(known, labels, strict=True)
        )
        sums[bounded] = sums.get(bounded, 0.0) + value
    yield from sums.items()


_STATES = ("open", "ready", "held", "leased")

POOL: Final = (
    Family("stepwell_pool_groups", GAUGE, "Groups in the pool, by state", "{channel}.live.{state}"),
    Family(
        "stepwell_pool_groups_submitted",
        COUNTER,
        "Groups that ever came in",
        "{channel}.groups.submitted",
    ),
    Family(
        "stepwell_pool_groups_acked",
        COUNTER,
        "Groups that a consumer is done with: trained, mostly",
        "{channel}.groups.acked",
    ),
    Family(
        "stepwell_pool_groups_dropped",
        COUNTER,
        "Groups that left the pool unserved, by reason",
        "{channel}.groups.drop_reasons.{reason}",
    ),
    Family(
        "stepwell_pool_trajectories",
        GAUGE,
        "Trajectories of groups in the pool, by state",
        "{channel}.kept.{state}",
    ),
    Family(
        "stepwell_pool_trajectories_submitted",
        COUNTER,
        "Trajectories that ever came in",
        "{channel}.trajectories.submitted",
    ),
    Family(
        "stepwell_pool_trajectories_aborted",
        COUNTER,
        "Trajectories that are not served, by reason",
        "{channel}.trajectories.abort_reasons.{reason}",
    ),
    Family(
        "stepwell_pool_trajectories_late",
        COUNTER,
        "Calls about a trajectory whose group had gone on without it",
        "{channel}.trajectories.late",
    ),
    Family(
        "stepwell_pool_steps_submitted",
        COUNTER,
        "Steps that came in, by outcome",
        "{channel}.outcomes.{outcome}",
    ),
    Family("stepwell_pool_steps", GAUGE, "Steps in the pool", "{channel}.steps.stored"),
    Family(
        "stepwell_pool_tokens",
        GAUGE,
        "Prompt and response tokens in the pool, a shared prefix counted each time",
        "{channel}.tokens.stored",
    ),
    Family(
        "stepwell_pool_memory_bytes",
        GAUGE,
        "Payloads of Steps in memory",
        "{channel}.memory_bytes",
    ),
    Family(
        "stepwell_pool_leases",
        GAUGE,
        "Batches that consumers hold",
        "{channel}.leases.active",
    ),
    Family(
        "stepwell_pool_leases_ended",
        COUNTER,
        "Leases that are over, by how they ended",
        "{channel}.ended.{outcome}",
    ),
    Family(
        "stepwell_pool_waiting",
        GAUGE,
        "Calls that wait in the pool: consumers for groups, producers for room",
        "{channel}.waiting.{role}",
    ),
    Family(
        "stepwell_pool_policy_version",
        GAUGE,
        "Policy version that generation uses, as the pool was told",
        "{channel}.policy_version",
    ),
    Family(
        "stepwell_pool_oldest_ready_policy_version",
        GAUGE,
        "Smallest policy version in a ready group",
        "{channel}.oldest_policy_version_ready",
    ),
    Family(
        "stepwell_pool_oldest_open_group_age_seconds",
        GAUGE,
        "Age of the group that has been open longest",
        "{channel}.oldest_open_age_s",
    ),
)
"""Of `{channel: GetStatistics}`, as `pool_counts` gives it."""


def pool_counts(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answer to `GetStatistics` with states and outcomes, which the table walks over, apart
    from sums."""
    return {
        name: {
            **counts,
            "live": {s: counts["groups"][s] for s in _STATES} | {"ready": counts["ready"]},
            "kept": {s: counts["trajectories"][s] for s in ("open", "complete")},
            "outcomes": {
                s: counts["steps"][s]
                for s in ("accepted", "duplicate", "late", "conflict", "rejected")
            },
            "ended": {s: counts["leases"][s] for s in ("acked", "nacked", "expired")},
        }
        for name, counts in statistics.items()
    }
