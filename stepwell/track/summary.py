"""Files that a run leaves behind for people: `reward.png` and `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.datapool.sealed import read_sealed, write_sealed
from stepwell.layout import REWARD_PLOT, SUMMARY
from stepwell.trainer.metrics import waits

if TYPE_CHECKING:
    from stepwell.trainer.progress import Progress

INK, BLUE, ORANGE, GREY = "#1f2933", "#2f6fde", "#e07b39", "#9aa5b1"


def summarise(
    name: str, records: Sequence[Mapping[str, Any]], progress: Progress, peak_bytes: int
) -> dict[str, Any]:
    """The figures of `summary.json`, over the whole run, from before a resume too.

    Args:
        peak_bytes: peak memory of all processes, of the last process of the run.
    """

    records = [r for r in records if "trajectories" in r]  # others are evaluations alone

    def mean(key: str) -> float | None:
        values = _known(records, key)
        return float(np.mean(values)) if values else None

    compared = [e for e in progress.evaluations if e.comparable_score is not None]
    before = next((e for e in compared[:1] if e.weights_step == 0), None)
    after = compared[-1] if compared else None

    gaps = _known(records, "log_prob_gap")
    return {
        "name": name,
        "optimizer_steps": progress.updates,
        "eval_before": None if before is None else before.comparable_score,
        "eval_after": None if after is None else after.comparable_score,
        "tool_use_before": None if before is None else before.tool_use,
        "tool_use_after": None if after is None else after.tool_use,
        "no_signal_share": mean("groups/no_signal"),
        "wall_s": progress.train_s,
        "off_policy_share": mean("off_policy_share"),
        "staleness_mean": mean("staleness/mean"),
        "steps_per_trajectory_mean": mean("num_turns/mean"),
        "tokens_per_s_mean": mean("tokens_per_s"),
        "rewards": _known(records, "reward/mean"),
        "sft_loss": _known(records, "sft/loss"),
        "trajectories_trained": sum(r["trajectories"] for r in records if not r.get("ppo_epoch")),
        "groups_dropped": records[-1]["pool/dropped"] if records else 0,
        **waits(records),
        "eval_rollouts_failed": sum(e.failed for e in progress.evaluations),
        "log_prob_gap_max": max(gaps, default=None),
        "peak_memory_gb": peak_bytes / 1e9,
        "evals": [asdict(e) for e in progress.evaluations],
    }


def _known(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The figures that are numbers: one that was NaN is null in metrics.jsonl."""
    return [r[key] for r in records if r.get(key) is not None]


def _or_nan(records: Sequence[Mapping[str, Any]], key: str, missing: float) -> list[float]:
    """A figure of every record, NaN for null, which is not drawn."""
    return [np.nan if (value := r.get(key, missing)) is None else value for r in records]


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    path = folder / SUMMARY
    write_sealed(path, summary)
    return path


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that ended, or None."""
    path = folder / SUMMARY
    return read_sealed(path, "delete it: the run writes it anew") if path.is_file() else None


def plot_reward(
    folder: Path,
    title: str,
    records: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
) -> Path:
    """Reward and tool use per optimizer step above; below the lag of the data, or, where all of it
    is conversations, their loss. Saved as `reward.png`.

    Args:
        records: lines of metrics.jsonl.
        evals: evaluations, each {"step", "score", "tool_use"}.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r["step"] for r in records]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    if any("reward/mean" in r for r in records):
        rewards = _or_nan(records, "reward/mean", np.nan)
        top.plot(steps, rewards, color=BLUE, lw=1.8, label="training reward")
    if any(r.get("tool_use") is not None for r in records):
        top.plot(
            steps,
            _or_nan(records, "tool_use", np.nan),
            color=GREY,
            lw=1.4,
            ls="--",
            label="episodes that call a tool",
        )
    top.plot(
        [e["step"] for e in evals],
        [e["score"] for e in evals],
        color=ORANGE,
        marker="o",
        ms=7,
        lw=0 if len(evals) < 3 else 1,
        label="evaluation",
        zorder=3,
    )
    for e in evals:
        top.annotate(
            f"{e['score']:.2f}",
            (e["step"], e["score"]),
            textcoords="offset points",
            xytext=(0, 10),
            ha="center",
            color=ORANGE,
            fontsize=10,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
            zorder=4,
        )
    shown = _known(records, "reward/mean")
    shown += [e["score"] for e in evals]
    if all(0 <= value <= 1 for value in shown):
        top.set_ylim(-0.03, 1.12)
    else:
        top.margins(y=0.12)
    top.set_ylabel("mean reward")
    top.set_title(title, loc="left", color=INK)
    if shown:
        top.legend(loc="best", frameon=False)
    key, told = "staleness/mean", "mean lag\n(versions)"
    if not any(key in r for r in records):
        key, told = "sft/loss", "SFT loss"
    bottom.fill_between(steps, _or_nan(records, key, 0.0), color=BLUE, alpha=0.3, lw=0)
    bottom.set_ylabel(told)
    bottom.set_xlabel("optimizer step")
    bottom.set_ylim(bottom=0)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GREY, alpha=0.25)
    path = folder / REWARD_PLOT
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
