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
"""Most values of one label: what comes after them is added up as `other`, as names may be an
agent's."""
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


def _counter(name: str, help: str, path: str) -> Family:
    return Family(f"stepwell_pool_{name}", COUNTER, help, f"{{channel}}.{path}")


def _gauge(name: str, help: str, path: str) -> Family:
    return Family(f"stepwell_pool_{name}", GAUGE, help, f"{{channel}}.{path}")


POOL: Final = (
    _gauge("groups", "Groups in the pool, by state", "live.{state}"),
    _counter("groups_submitted", "Groups that ever came in", "groups.submitted"),
    _counter(
        "groups_acked", "Groups that a consumer is done with: trained, mostly", "groups.acked"
    ),
    _counter(
        "groups_dropped",
        "Groups that left the pool unserved, by reason",
        "groups.drop_reasons.{reason}",
    ),
    _gauge("trajectories", "Trajectories of groups in the pool, by state", "kept.{state}"),
    _counter("trajectories_submitted", "Trajectories that ever came in", "trajectories.submitted"),
    _counter(
        "trajectories_aborted",
        "Trajectories that are not served, by reason",
        "trajectories.abort_reasons.{reason}",
    ),
    _counter(
        "trajectories_late",
        "Calls about a trajectory whose group had gone on without it",
        "trajectories.late",
    ),
    _counter("steps_submitted", "Steps that came in, by outcome", "outcomes.{outcome}"),
    _gauge("steps", "Steps in the pool", "steps.stored"),
    _gauge(
        "tokens",
        "Prompt and response tokens in the pool, a shared prefix counted each time",
        "tokens.stored",
    ),
    _gauge("memory_bytes", "Payloads of Steps in memory", "memory_bytes"),
    _gauge("picture_bytes", "Pictures of Steps in the pool, each once", "pictures.bytes"),
    _gauge("leases", "Batches that consumers hold", "leases.active"),
    _counter("leases_ended", "Leases that are over, by how they ended", "ended.{outcome}"),
    _gauge(
        "waiting",
        "Calls that wait in the pool: consumers for groups, producers for room",
        "waiting.{role}",
    ),
    _gauge(
        "policy_version",
        "Policy version that generation uses, as the pool was told",
        "policy_version",
    ),
    _gauge(
        "oldest_ready_policy_version",
        "Smallest policy version in a ready group",
        "oldest_policy_version_ready",
    ),
    _gauge(
        "oldest_open_group_age_seconds",
        "Age of the group that has been open longest",
        "oldest_open_age_s",
    ),
)
"""Metrics of `{channel: GetStatistics}`, as `pool_counts` gives it."""


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
