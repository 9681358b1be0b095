"""Trajectories that a step was trained on: written and read back, in a bounded folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepwell.datapool.errors import DamagedFileError, ExportError
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    read_about,
    read_trained,
    trained_path,
    trained_steps,
    write_trained,
)
from stepwell.datapool.types import Step, Trajectory


def trajectory(uid: str, n_turns: int, n: int = 4) -> TrainedTrajectory:
    """A chain with a branch at its end."""
    steps: list[Step] = []
    prompt = list(range(10))
    for i in range(n_turns):
        response = [100 + i] * n
        steps.append(
            Step(
                prompt_ids=prompt,  # type: ignore[arg-type]  # lists are normalised
                response_ids=response,  # type: ignore[arg-type]
                rollout_log_probs=[-0.125] * n,  # type: ignore[arg-type]
                trajectory_uid=uid,
                prompt_uid="p",
                step_index=i,
                parent_index=i - 1 if 0 < i < n_turns - 1 else None,
                reward=0.5,
                metadata={"messages": [{"role": "user", "content": "é"}]},
            )
        )
        prompt = [*prompt, *response, 7] if i + 2 < n_turns else [9, 9]
    columns = tuple(
        {"advantages": np.full(n, 0.25 * i), "mask": np.ones(n)} for i in range(n_turns)
    )
    return TrainedTrajectory(Trajectory(uid, "p", tuple(steps), {"k": 1}), columns)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    of = [trajectory("a", 5), trajectory("b", 1)]
    of[1].columns[0]["advantages"][1] = np.nan  # type: ignore[index]
    write_trained(tmp_path, 3, {"groups": 8}, of, 1 << 20)
    found = read_trained(tmp_path, 3)
    assert [t.trajectory for t in found] == [t.trajectory for t in of]
    for read, written in zip(found, of, strict=True):
        for a, b in zip(read.columns, written.columns, strict=True):
            np.testing.assert_allclose(a["advantages"], b["advantages"])
    about = read_about(tmp_path, 3)
    assert about["groups"] == 8
    assert [(t["trajectory_uid"], t["n_steps"], t["reward"]) for t in about["trajectories"]] == [
        ("a", 5, 2.5),
        ("b", 1, 0.5),
    ]
    assert about["trajectories"][0]["advantage"] == pytest.approx(0.5)


def test_steps_may_stand_in_any_order(tmp_path: Path) -> None:
    chain = trajectory("a", 4)
    steps = chain.trajectory.steps
    written = TrainedTrajectory(replace(chain.trajectory, steps=steps[::-1]), chain.columns[::-1])
    nothing = TrainedTrajectory(replace(chain.trajectory, steps=()), ())
    write_trained(tmp_path, 1, {}, [written, nothing], 1 << 20)
    found, none = read_trained(tmp_path, 1)
    assert (found.trajectory, none) == (chain.trajectory, nothing)
    assert [c["advantages"][0] for c in found.columns] == [0.0, 0.25, 0.5, 0.75]


def test_a_shared_prefix_is_stored_once(tmp_path: Path) -> None:
    write_trained(tmp_path, 1, {}, [trajectory("a", 10, n=100)], 1 << 20)
    write_trained(tmp_path, 2, {}, [trajectory("a", 20, n=100)], 1 << 20)
    one, two = (trained_path(tmp_path, step).stat().st_size for step in (1, 2))
    assert two < 2.2 * one


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_trained(tmp_path, step, {}, [trajectory("a", 2)], 1 << 20)
    size = trained_path(tmp_path, 7).stat().st_size
    write_trained(tmp_path, 8, {}, [trajectory("a", 2)], 3 * size + size // 2)
    assert trained_steps(tmp_path) == [6, 7, 8]
    write_trained(tmp_path, 9, {}, [trajectory("a", 2)], 1)
    assert trained_steps(tmp_path) == [9]  # the newest is kept, whatever it takes
    with pytest.raises(ExportError, match=r"trainer\.sample_mb"):
        read_trained(tmp_path, 8)
    trained_path(tmp_path, 9).write_bytes(b'{"step": 9}\n{"torn')
    with pytest.raises(DamagedFileError, match=r"000000000009\.jsonl is damaged .* delete it"):
        read_trained(tmp_path, 9)


def test_metadata_for_which_json_has_no_word_is_written_as_what_it_holds(tmp_path: Path) -> None:
    written = trajectory("a", 1)
    metadata = {"array": np.arange(2), "number": np.float32(0.5), "set": {3, 1}, "path": Path("x")}
    of = replace(written.trajectory, metadata=metadata)
    write_trained(tmp_path, 1, {}, [TrainedTrajectory(of, written.columns)], 1 << 20)
    (found,) = read_trained(tmp_path, 1)
    assert found.trajectory.metadata == {
        "array": [0, 1],
        "number": 0.5,
        "set": [1, 3],
        "path": repr(Path("x")),
    }


@pytest.mark.parametrize(("kept", "why"), [(0, "it is empty"), (2, "lines are missing")])
def test_a_file_that_lost_its_end_is_damaged(tmp_path: Path, kept: int, why: str) -> None:
    write_trained(tmp_path, 1, {}, [trajectory("a", 1), trajectory("b", 1)], 1 << 20)
    path = trained_path(tmp_path, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(DamagedFileError, match=why):
        read_trained(tmp_path, 1)
