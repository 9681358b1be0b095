"""`python -m benchmarks tasks [--only NAME …] [--seeds 0 1 2] [--record]`: what the tasks in
`examples/` teach their models.

For each task its model and data are made, unless they are there, then one run per seed. A run that
has ended is not repeated; delete its folder to have it again:

    runs/NAME-model      model and data, by examples/NAME/prepare.py
    runs/NAME-SEED       one run of configs/NAME.yaml
    runs/NAME.png        curves of the seeds (with --record: examples/NAME/curve.png)
    runs/NAME.md         conversations of the first and of the last batch (…/transcripts.md)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.checks import BenchResult, chosen_sections
from benchmarks.processes import python
from stepwell.datapool.types import Group
from stepwell.track.summary import BLUE, GREY, ORANGE, read_summary
from stepwell.trainer.recording import load_recording, recordings

RUNS = Path("runs")
GAINS = {
    "tictactoe": 0.15,
    "search_cite": 0.3,
    "instructions": 0.3,
    "harness_shell": 0.3,
    "colours": 0.55,
}
"""Task -> what the evaluation score rises by in every run."""
SMOOTHED = 5
"""Optimizer steps in the running mean of the reward."""
SHOWN = 4
"""Conversations before, and as many after."""


async def run(
    *,
    only: Annotated[Sequence[str], "tasks; all, if none is named"] = (),
    seeds: Sequence[int] = (0,),
    record: Annotated[bool, "curve and conversations into examples/"] = False,
) -> BenchResult:
    """Runs what is missing, one after the other.

    Raises:
        RuntimeError: a run failed.
    """
    result = BenchResult()
    rows: list[dict[str, Any]] = []
    for task in chosen_sections(only, GAINS):
        if not (RUNS / f"{task}-model" / "config.json").is_file():
            await _do(f"examples.{task}.prepare", str(RUNS / f"{task}-model"))
        for seed in seeds:
            await _train(task, seed)
        summaries = {seed: _summary(task, seed) for seed in seeds}
        for seed, s in summaries.items():
            before, after = s["eval_before"], s["eval_after"]
            rows.append(
                {"task": task, "seed": seed, "before": before, "after": after}
                | {"steps": s["optimizer_steps"], "training_s": s["wall_s"]}
            )
            result.at_least(f"{task}, seed {seed}: gain", after - before, GAINS[task])
        folder = Path("examples") / task
        plot(task, summaries, folder / "curve.png" if record else RUNS / f"{task}.png")
        page = folder / "transcripts.md" if record else RUNS / f"{task}.md"
        page.write_text(transcripts(task, seeds[0]))
        print(f"{task}: conversations before and after in {page}", file=sys.stderr)
    result.figures["score of the evaluation"] = rows
    return result


async def _train(task: str, seed: int) -> None:
    name = f"{task}-{seed}"
    if read_summary(RUNS / name) is None:
        recorded = f"trainer.save_debug_rollout_data={RUNS / name / 'batches'}"
        options = (f"run.name={name}", f"run.seed={seed}", recorded, "logging.wandb=disabled")
        await _do("stepwell", "train", "--config", task, *options)


async def _do(module: str, *arguments: str) -> None:
    """Run a module; what it prints goes to stderr, as stdout is the bench's."""
    async with python("-m", module, *arguments, output=sys.stderr.fileno()) as process:
        if code := await process.wait():
            raise RuntimeError(f"{' '.join((module, *arguments))} failed with exit code {code}")


def _summary(task: str, seed: int) -> dict[str, Any]:
    summary = read_summary(RUNS / f"{task}-{seed}")
    if summary is None:
        raise RuntimeError(f"{RUNS / f'{task}-{seed}'} has no summary: the run did not end")
    return summary


def plot(task: str, summaries: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Reward by optimizer step, a line per seed, and the evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for seed, summary in summaries.items():
        rewards = np.asarray(summary["rewards"])
        mean = np.convolve(rewards, np.ones(SMOOTHED) / SMOOTHED, "valid")
        first = seed == next(iter(summaries))
        axes.plot(
            range(SMOOTHED, len(rewards) + 1),
            mean,
            color=BLUE,
            lw=1.3,
            alpha=0.7,
            label=f"reward, mean of {SMOOTHED} steps" if first else None,
        )
        axes.plot(
            [e["step"] for e in summary["evals"]],
            [e["score"] for e in summary["evals"]],
            color=ORANGE,
            marker="o",
            ms=5,
            lw=1,
            alpha=0.8,
            label="evaluation" if first else None,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{task}, seed {', '.join(map(str, summaries))}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def transcripts(task: str, seed: int) -> str:
    """A page with conversations of the first batch and of the last, as the policy wrote them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(RUNS / f"{task}-model")
    batches = recordings(str(RUNS / f"{task}-{seed}" / "batches"))
    text = f"# {task}: conversations of seed {seed}\n\nMade by `python -m benchmarks tasks`.\n"
    for when, (step, path) in (("Before", batches[0]), ("After", batches[-1])):
        text += f"\n## {when}: the batch after {step} optimizer steps\n"
        for group in load_recording(path).groups[:SHOWN]:
            text += f"\n```\n{_conversation(tokenizer, group)}\n```\n"
    return text


def _conversation(tokenizer: Any, group: Group) -> str:
    """The first rollout of a group, and its reward."""
    trajectory = group.trajectories[0]
    last = trajectory.steps[-1]
    said = tokenizer.decode([*last.prompt_ids.tolist(), *last.response_ids.tolist()])
    reward = sum(step.reward or 0.0 for step in trajectory.steps)
    return f"{said.strip()}\n→ reward {reward:g}"
