"""This module turns counts that somebody keeps anyway into Prometheus' metric families, so that
there is one place of truth and a call is never made slower by being counted twice.

    {"train": {"groups": {"drop_reasons": {"stale": 3}}, …}}
        ──read──► {"train": {"stale": 3}} ──labels channel, reason──►
            stepwell_pool_groups_dropped_total{channel="train", reason="stale"} 3

Each family reads the counts with a function of its own. `POOL` is the table of a pool's channels.
Does not own the counts (`core/accounting.py`), or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Kind: TypeAlias = Literal["counter", "gauge"]
COUNTER: Final = "counter"
GAUGE: Final = "gauge"
MOST_VALUES: Final = 64
"""Most values of one label: what comes after them is added up as `other`, as names may be an
agent's."""
OTHER: Final = "other"
_Sample: TypeAlias = tuple[tuple[str, ...], float]
_Read: TypeAlias = Callable[[Mapping[str, Any]], Any]


class Family(NamedTuple):
    """One metric family."""

    name: str
    """Without a counter's `_total`."""
    kind: Kind
    help: str
    read: Callable[[Any], Any]
    """Returns the numbers of these counts: by the value of the first label, by that of the second,
    and so on. None: there is no sample; a counter without labels is 0 then."""
    labels: tuple[str, ...] = ()

    @property
    def exposed(self) -> str:
        """The name that Prometheus shows."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name


def families(table: Iterable[Family], counts: Any, most: int = MOST_VALUES) -> Iterator[Metric]:
    """The families of `table` with their samples in `counts`, and of a label `most` values."""
    for family in table:
        kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
        metric = kind(family.name, family.help, labels=family.labels)
        found = family.read(counts)
        if found is None and family.kind == COUNTER and not family.labels:
            found = 0
        for labels, value in _bounded(_samples(found, len(family.labels)), most):
            metric.add_metric(list(labels), value)
        yield metric


def _samples(found: Any, n_labels: int, labels: tuple[str, ...] = ()) -> Iterator[_Sample]:
    if found is None:
        return
    if not n_labels:
        yield labels, float(found)
        return
    for label, inner in found.items():
        yield from _samples(inner, n_labels - 1, (*labels, str(label)))


def _bounded(samples: Iterable[_Sample], most: int) -> Iterator[_Sample]:
    """Merge samples until each label has few values."""
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
_OUTCOMES = ("accepted", "duplicate", "late", "conflict", "rejected")
_ENDS = ("acked", "nacked", "expired")


def _family(name: str, kind: Kind, help: str, read: _Read, *labels: str) -> Family:
    """A family that reads the statistics of each channel."""

    def of_each(statistics: Mapping[str, Any]) -> dict[str, Any]:
        return {channel: read(counts) for channel, counts in statistics.items()}

    return Family(f"stepwell_pool_{name}", kind, help, of_each, ("channel", *labels))


def _by_state(counts: Mapping[str, Any]) -> dict[str, int]:
    # `groups.ready` includes those that are held.
    return {state: counts["groups"][state] for state in _STATES} | {"ready": counts["ready"]}


POOL: Final = (
    _family("groups", GAUGE, "Groups in the pool, by state", _by_state, "state"),
    _family(
        "groups_submitted",
        COUNTER,
        "Groups that ever came in",
        lambda counts: counts["groups"]["submitted"],
    ),
    _family(
        "groups_acked",
        COUNTER,
        "Groups that a consumer is done with: trained, mostly",
        lambda counts: counts["groups"]["acked"],
    ),
    _family(
        "groups_dropped",
        COUNTER,
        "Groups that left the pool unserved, by reason",
        lambda counts: counts["groups"]["drop_reasons"],
        "reason",
    ),
    _family(
        "trajectories",
        GAUGE,
        "Trajectories of groups in the pool, by state",
        lambda counts: {s: counts["trajectories"][s] for s in ("open", "complete")},
        "state",
    ),
    _family(
        "trajectories_submitted",
        COUNTER,
        "Trajectories that ever came in",
        lambda counts: counts["trajectories"]["submitted"],
    ),
    _family(
        "trajectories_aborted",
        COUNTER,
        "Trajectories that are not served, by reason",
        lambda counts: counts["trajectories"]["abort_reasons"],
        "reason",
    ),
    _family(
        "trajectories_late",
        COUNTER,
        "Calls about a trajectory whose group had gone on without it",
        lambda counts: counts["trajectories"]["late"],
    ),
    _family(
        "steps_submitted",
        COUNTER,
        "Steps that came in, by outcome",
        lambda counts: {outcome: counts["steps"][outcome] for outcome in _OUTCOMES},
        "outcome",
    ),
    _family("steps", GAUGE, "Steps in the pool", lambda counts: counts["steps"]["stored"]),
    _family(
        "tokens",
        GAUGE,
        "Prompt and response tokens in the pool, a shared prefix counted each time",
        lambda counts: counts["tokens"]["stored"],
    ),
    _family(
        "memory_bytes",
        GAUGE,
        "Payloads of Steps in memory",
        lambda counts: counts["memory_bytes"],
    ),
    _family(
        "picture_bytes",
        GAUGE,
        "Pictures of Steps in the pool, each once",
        lambda counts: counts["pictures"]["bytes"],
    ),
    _family(
        "leases",
        GAUGE,
        "Batches that consumers hold",
        lambda counts: counts["leases"]["active"],
    ),
    _family(
        "leases_ended",
        COUNTER,
        "Leases that are over, by how they ended",
        lambda counts: {end: counts["leases"][end] for end in _ENDS},
        "outcome",
    ),
    _family(
        "waiting",
        GAUGE,
        "Calls that wait in the pool: consumers for groups, producers for room",
        lambda counts: counts["waiting"],
        "role",
    ),
    _family(
        "policy_version",
        GAUGE,
        "Policy version that generation uses, as the pool was told",
        lambda counts: counts["policy_version"],
    ),
    _family(
        "oldest_ready_policy_version",
        GAUGE,
        "Smallest policy version in a ready group",
        lambda counts: counts["oldest_policy_version_ready"],
    ),
    _family(
        "oldest_open_group_age_seconds",
        GAUGE,
        "Age of the group that has been open longest",
        lambda counts: counts["oldest_open_age_s"],
    ),
)
"""Metrics of `{channel: GetStatistics}`."""
