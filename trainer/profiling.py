"""This module writes a trace of named optimizer steps to the run's folder, so that people see where
a step's time goes.

    trainer.profile_steps=[3]     runs/NAME/profile/step_3.json.gz: Perfetto, chrome://tracing

A trace holds the operators of the CPU and the kernels of the GPU of the trainer's process, by
PyTorch's profiler. Does not own how long the loop's phases take (`metrics.Phases`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

PROFILE = "profile"
"""Folder of the traces, in the run's folder."""

T = TypeVar("T")


def traced(
    name: str, number: int, wanted: Collection[int], folder: Path, work: Callable[[], T]
) -> T:
    """Run `work` and return its result, with a trace `{name}_{number}` if `number` is wanted. Must
    be called in the thread that computes.

    Args:
        folder: of the run.
    """
    if number not in wanted:
        return work()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as trace:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path = folder / PROFILE / f"{name}_{number}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    return result
