"""`python -m benchmarks.trainer.memory FORM MODEL_DIR SHAPE`: peak memory of one form.

A process of its own for each form: the peak of a process never falls, and what one form leaves
behind the next would find. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from asyncio.subprocess import PIPE
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.processes import python
from benchmarks.trainer.workload import Shape, groups

MB = 1e6


@dataclass(frozen=True, slots=True)
class Peak:
    """Resident memory in MB: before the first step (libraries and weights), and at most."""

    before_mb: float
    peak_mb: float

    @property
    def step_mb(self) -> float:
        """Memory that training adds: activations, gradients and optimizer state."""
        return self.peak_mb - self.before_mb


async def peak_memory(form: str, folder: Path, shape: Shape, vocab: int) -> Peak:
    """Measure the peak memory of optimizer steps on one trajectory and on one group, in a fresh
    process.

    Raises:
        RuntimeError: the process failed.
    """
    arguments = json.dumps({"form": form, "folder": str(folder), "vocab": vocab} | asdict(shape))
    command = ("-m", "benchmarks.trainer.memory", arguments)
    async with python(*command, output=PIPE, OMP_NUM_THREADS="1") as process:
        stdout, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the process of form {form!r} ended with {process.returncode}")
    return Peak(**json.loads(stdout.splitlines()[-1]))


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError(f"/proc/self/status has no {field}; this is measured on Linux only")


def _main(arguments: str) -> None:
    options = json.loads(arguments)
    name, folder, vocab = options.pop("form"), Path(options.pop("folder")), options.pop("vocab")
    import torch

    from benchmarks.trainer.forms import make_form

    torch.set_num_threads(1)
    form = make_form(name, folder)
    shape = Shape(**options)
    (steps,) = groups(replace(shape, prompts=1), vocab)
    before = _status_mb("VmRSS")
    # The optimizer makes its state in the first step, after which it stays.
    form.step(steps[: shape.turns])
    form.step(steps)
    peak = Peak(before, _status_mb("VmHWM"))
    print(json.dumps(asdict(peak)))


if __name__ == "__main__":
    _main(sys.argv[1])
