"""`python -m benchmarks trainer`: one optimizer step in each row form, beside a plain loop and TRL.

    equality   loss and gradient of every form and split against one row per step   forms.py
    tiny       speed on the quickstart's model, 0.85 M parameters                   forms.py
    29M        speed and peak memory on a 29 M-parameter model           forms.py, memory.py

The batch is 8 prompts × 8 rollouts × 4 steps (`workload.py`), fp32, one thread. The forms take
turns, an optimizer step over the whole batch each, and are compared by the CPU time of a round:
what else runs on the machine falls on all of them. A speed is in logical tokens/s: every step with
its whole prompt, however few of those tokens a form computes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checks import BenchResult, chosen_sections
from benchmarks.trainer.memory import Peak, peak_memory
from benchmarks.trainer.workload import (
    FULL,
    ModelName,
    Shape,
    groups,
    logical_tokens,
    make_model,
)

SECTIONS = ("equality", "tiny", "29M")
OURS = ("step", "merged", "tree")
REACH: Mapping[str, float] = {"step": 1.45, "merged": 4.0, "tree": 5.2}
"""Speed over the plain form's, at least."""
RIVAL: Mapping[str, str] = {"step": "trl", "merged": "trl-merged", "tree": "trl-merged"}
"""TRL's form that each must beat in the same run."""
GRADIENT_ERROR = 1e-5
MEMORY_RATIO = 0.65
ROUNDS: Mapping[ModelName, int] = {"tiny": 3, "29M": 1}
"""Optimizer steps of each form; five and 30 minutes of CPU time."""
QUICK = Shape(prompts=1, rollouts=2, turns=2, prompt=32, turn=8, response=8)
EQUALITY = Shape(prompts=2, rollouts=3, turns=3, prompt=48, turn=13, response=9)


async def run(*, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All sections, or those named in `only`.

    Raises:
        ConfigError: `only` names no section.
        RuntimeError: a process that measures memory failed.
    """
    wanted = chosen_sections(only, SECTIONS)
    shape = QUICK if quick else FULL
    report = BenchResult()
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder, _one_thread():
        if "equality" in wanted:
            _equality(Path(folder) / "equality", report)
        models: tuple[ModelName, ...] = ("tiny", "29M")
        for model in models:
            if model in wanted:
                _speed(model, Path(folder) / model, shape, report)
        if "29M" in wanted:
            await _memory(Path(folder) / "29M", shape, report)
    return report.without_bounds() if quick else report


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _equality(folder: Path, report: BenchResult) -> None:
    """The gradient is read from AdamW, whose first moment after one step with β1 = 0 it is."""
    from benchmarks.trainer.forms import Rows

    vocab = make_model("tiny", folder)
    steps = [step for group in groups(EQUALITY, vocab) for step in group]
    options = {"betas": (0.0, 0.95), "max_grad_norm": 1e9}

    def gradient(form: Any, budget: int) -> list[Any]:
        rows = Rows(form, folder, micro_batch_tokens=budget, **options)
        rows.step(steps)
        state = rows.backend.state_dict()["optimizer"]["state"]
        return [state[key]["exp_avg"] for key in sorted(state)]

    expected = gradient("step", 1)
    size = max(float(g.abs().max()) for g in expected)
    worst = max(
        float((got - want).abs().max()) / size
        for form in OURS
        for budget in (1, 200, 100_000)
        for got, want in zip(gradient(form, budget), expected, strict=True)
    )
    report.at_most("gradient_difference_max", worst, GRADIENT_ERROR)


def _speed(model: ModelName, folder: Path, shape: Shape, report: BenchResult) -> None:
    from benchmarks.trainer.forms import Plain, make_form
    from benchmarks.trainer.trl_forms import INSTALL, is_installed

    vocab = make_model(model, folder)
    names = [Plain.name, *OURS]
    if is_installed():
        names += ["trl", "trl-merged"]
    else:
        report.figures["trl, not installed"] = INSTALL
    forms = [make_form(name, folder) for name in names]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    steps = [step for group in groups(shape, vocab) for step in group]
    for form in forms:
        form.step(steps[: shape.turns])
    for i in range(ROUNDS[model]):
        # Each goes first once in a while: none always runs into what the one before left behind.
        for form in forms[i % len(forms) :] + forms[: i % len(forms)]:
            began = time.process_time()
            form.step(steps)
            seconds[form.name].append(time.process_time() - began)

    def over(name: str, other: str) -> float:
        """Median factor by which `name` is faster than `other`, round by round."""
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    tokens = logical_tokens(steps)
    report.figures[f"{model}: logical tokens/s"] = [
        {
            "form": form.name,
            "computed tokens": form.computed,
            "CPU s": statistics.median(seconds[form.name]),
            "tokens/s": tokens / statistics.median(seconds[form.name]),
            "over plain": over(form.name, Plain.name),
        }
        for form in forms
    ]
    for name in OURS:
        report.at_least(f"{model}_{name}_over_plain", over(name, Plain.name), REACH[name])
        if (rival := RIVAL[name]) in seconds:
            report.at_least(f"{model}_{name}_over_{rival}", over(name, rival), 1.0)


async def _memory(folder: Path, shape: Shape, report: BenchResult) -> None:
    vocab = make_model("29M", folder)
    peaks: dict[str, Peak] = {
        name: await peak_memory(name, folder, shape, vocab) for name in ("plain", *OURS)
    }
    report.figures["29M: peak memory, MB"] = [
        {
            "form": name,
            "before": peak.before_mb,
            "peak": peak.peak_mb,
            "of the step": peak.step_mb,
            "over plain": peak.step_mb / peaks["plain"].step_mb,
            "process over plain's": peak.peak_mb / peaks["plain"].peak_mb,
        }
        for name, peak in peaks.items()
    ]
    ratio = peaks["tree"].step_mb / peaks["plain"].step_mb
    report.at_most("29M_tree_memory_over_plain", ratio, MEMORY_RATIO)
