"""Copies of trajectories in a run's folder: what is deleted is in none of them, now or later."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files import copies as module
from stepwell.datapool.files.copies import LOCK, OLD, ROLLOUTS, VALIDATION, TrainerCopies
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    read_about,
    read_trained,
    trained_path,
    write_trained,
)
from stepwell.datapool.sealed import read_lines, sealed
from stepwell.datapool.types import Step, Trajectory


def trained(uid: str, prompt_uid: str, user: str | None = None) -> TrainedTrajectory:
    step = Step(
        prompt_ids=[1, 2],  # type: ignore[arg-type]
        response_ids=[3],  # type: ignore[arg-type]
        trajectory_uid=uid,
        prompt_uid=prompt_uid,
        metadata={"messages": [{"role": "user", "content": f"said by {uid}"}]},
    )
    return TrainedTrajectory(Trajectory(uid, prompt_uid, (step,)), ({},), user)


def row(uid: str, prompt_uid: str, user: str | None = None) -> dict[str, Any]:
    about = {"trajectory_uid": uid, "prompt_uid": prompt_uid, "user": user}
    return about | {"prompt": f"said by {uid}", "reward": 1.0}


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


OURS = (("mine", "g", None), ("mate", "g", None), ("eves", "h", "eve"), ("other", "o", None))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Copies of four trajectories: `mine` and `mate` in one group, `eves` of a user."""
    write_trained(tmp_path, 3, {"groups": 3}, [trained(*each) for each in OURS], 1 << 20)
    rows = [row(*each) for each in OURS]
    (tmp_path / ROLLOUTS).write_bytes(lines(*rows))
    (tmp_path / OLD).write_bytes(lines(*rows))
    (tmp_path / VALIDATION).mkdir()
    table = b"".join(map(sealed, lines(*rows).splitlines(keepends=True)))
    (tmp_path / VALIDATION / "step_3.jsonl").write_bytes(table)
    return tmp_path


def left(run: Path) -> dict[str, list[str]]:
    """Trajectories in each file, all of which are sound."""
    found = {"trained": [t.trajectory.trajectory_uid for t in read_trained(run, 3)]}
    assert [t["trajectory_uid"] for t in read_about(run, 3)["trajectories"]] == found["trained"]
    for name in (ROLLOUTS, OLD):
        parsed = map(orjson.loads, (run / name).read_bytes().splitlines())
        found[name] = [each["trajectory_uid"] for each in parsed]
    table = [line for _, line in read_lines(run / VALIDATION / "step_3.jsonl")]
    found["validation"] = [orjson.loads(line or b"")["trajectory_uid"] for line in table]
    return found


def words(run: Path) -> set[str]:
    """Trajectories whose words are in any file."""
    data = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    return {uid for uid, *_ in OURS if f"said by {uid}".encode() in data}


@pytest.mark.parametrize(
    ("asked", "stays"),
    [
        ({"kind": "trajectory", "value": "mine"}, ["mate", "eves", "other"]),
        ({"kind": "trajectory", "value": "mine", "with_groups": True}, ["eves", "other"]),
        ({"kind": "user", "value": "eve"}, ["mine", "mate", "other"]),
        ({"kind": "trajectory", "value": "nobody"}, ["mine", "mate", "eves", "other"]),
    ],
)
def test_no_copy_has_a_byte_of_it_and_the_others_are_as_they_were(
    run: Path, asked: dict[str, Any], stays: list[str]
) -> None:
    before = (run / ROLLOUTS).read_bytes().splitlines()
    kind, value = asked["kind"], asked["value"]
    gone = TrainerCopies(run).delete(kind, value, with_groups=asked.get("with_groups", False))
    assert set(gone) == {uid for uid, *_ in OURS} - {*stays}
    assert {tuple(each) for each in left(run).values()} == {tuple(stays)}
    assert words(run) == {*stays}
    assert (run / ROLLOUTS).read_bytes().splitlines() == [
        line for line, (uid, *_) in zip(before, OURS, strict=True) if uid in stays
    ]
    assert TrainerCopies(run).delete(kind, value) == []


def test_the_rewards_of_a_group_go_with_what_is_deleted_of_it(run: Path) -> None:
    rewards = {"g": [0.25, 1.0], "h": [0.5], "not in the sample": [0.0]}
    write_trained(run, 3, {"rewards": rewards}, [trained(*each) for each in OURS], 1 << 20)
    TrainerCopies(run).delete("user", "eve", with_groups=True)
    assert read_about(run, 3)["rewards"] == {"g": [0.25, 1.0], "not in the sample": [0.0]}


def test_a_writer_that_has_it_leaves_it_out_later(run: Path) -> None:
    TrainerCopies(run).delete("trajectory", "leased")
    with TrainerCopies(run).writing() as deleted:
        assert "leased" in deleted
        assert "mine" not in deleted


def test_an_uid_or_a_user_within_a_text_means_nothing(run: Path) -> None:
    said = row("t", "p") | {"prompt": '{"trajectory_uid":"mine","user":"eve"}', "answer": "mine"}
    (run / ROLLOUTS).write_bytes(lines(said, row('q"é', "p")))
    TrainerCopies(run).delete("trajectory", "mine")
    TrainerCopies(run).delete("user", "eve")
    assert orjson.loads((run / ROLLOUTS).read_bytes().splitlines()[0]) == said
    assert TrainerCopies(run).delete("trajectory", 'q"é') == ['q"é']
    assert (run / ROLLOUTS).read_bytes() == lines(said)


def test_what_a_killed_writer_left_half_written_goes(run: Path) -> None:
    with (run / ROLLOUTS).open("ab") as file:
        file.write(lines(row("mine", "g"))[:-9])
    for path in (trained_path(run, 3), trained_path(run, 4), run / ROLLOUTS):
        path.with_name(f"{path.name}.1-1.tmp").write_text("said by mine")
    TrainerCopies(run).delete("trajectory", "mine")
    assert words(run) == {"mate", "eves", "other"}
    assert left(run)[ROLLOUTS] == ["mate", "eves", "other"]


def test_a_deletion_that_was_killed_is_done_by_the_next(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "written_durably", dies)
    with pytest.raises(KeyboardInterrupt):
        TrainerCopies(run).delete("trajectory", "mine", with_groups=True)
    monkeypatch.undo()
    assert words(run) == {"mine", "mate", "eves", "other"}
    TrainerCopies(run).delete("trajectory", "other")
    assert words(run) == {"eves"}


def test_rollouts_that_become_the_old_ones_meanwhile_are_without_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / OLD).write_bytes(lines(row("mine", "g"), row("older", "o")))
    rewrite = module.written_durably

    @contextmanager
    def rewrite_then_rotate(path: Path) -> Iterator[Any]:
        """A trainer has the lock next, after the first of the two was written anew."""
        with rewrite(path) as file:
            yield file
        if path.name in (OLD, ROLLOUTS) and not rotated:
            rotated.append((run / ROLLOUTS).replace(run / OLD))
            (run / ROLLOUTS).write_bytes(lines(row("newer", "n")))

    rotated: list[Path] = []
    monkeypatch.setattr(module, "written_durably", rewrite_then_rotate)
    TrainerCopies(run).delete("trajectory", "mine")
    assert rotated
    assert left(run)[OLD] == ["mate", "eves", "other"]
    assert left(run)[ROLLOUTS] == ["newer"]


@pytest.mark.parametrize("n", [32, 88, 140, 300])
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_uid_of_any_length_is_found_anywhere_in_a_recording(
    tmp_path: Path, n: int, protocol: int
) -> None:
    """Also behind a number in the pickle that looks like the beginning of a text."""
    uid = "u" * n
    before = [f"{i:04}" for i in range(300)]
    for i in range(300):
        (tmp_path / f"{i}.pt").write_bytes(pickle.dumps([*before[:i], uid], protocol))
    TrainerCopies(tmp_path / "run").note_recordings(tmp_path / "{rollout_id}.pt")
    TrainerCopies(tmp_path / "run").delete("trajectory", uid[1:])
    assert len([*tmp_path.glob("*.pt")]) == 300
    TrainerCopies(tmp_path / "run").delete("trajectory", uid)
    assert not [*tmp_path.glob("*.pt")]


def test_a_trainer_writes_while_recordings_are_searched(run: Path) -> None:
    where = run / "recorded"
    where.mkdir()
    TrainerCopies(run).note_recordings(where / "{rollout_id}.pt")
    os.mkfifo(where / "0.pt")  # reading it ends when this test says so
    with ThreadPoolExecutor() as threads:
        deletion = threads.submit(TrainerCopies(run).delete, "trajectory", "mine")
        with (where / "0.pt").open("wb"), (run / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert deletion.result() == ["mine"]


@pytest.mark.parametrize("name", ["trained/000000000003.jsonl", "validation/step_3.jsonl"])
def test_a_damaged_line_that_may_be_it_is_an_error(run: Path, name: str) -> None:
    data = bytearray((run / name).read_bytes())
    data[data.index(b'"mine"') + 1] ^= 1
    (run / name).write_bytes(data)
    with pytest.raises(DamagedFileError, match=r"could still hold .* remove it, then delete again"):
        TrainerCopies(run).delete("trajectory", "mine")
    (run / name).unlink()
    TrainerCopies(run).delete("trajectory", "mine")
    assert words(run) == {"mate", "eves", "other"}


def test_without_copies_nothing_is_written_but_what_is_deleted(tmp_path: Path) -> None:
    assert TrainerCopies(tmp_path / "run").delete("user", "eve") == []
    assert TrainerCopies(tmp_path / "run").delete("trajectory", "t") == []
    assert TrainerCopies(tmp_path / "run").deleted() == {"t"}


def append(run: Path, n: int) -> None:
    """Append rollouts as a trainer does, the deleted ones left out."""
    for i in range(n):
        with TrainerCopies(run).writing() as deleted, (run / ROLLOUTS).open("ab") as file:
            rows = [row(f"{i}-{os.getpid()}", "p"), row("mine", "g"), row("mate", "g")]
            file.write(lines(*(each for each in rows if each["trajectory_uid"] not in deleted)))
        time.sleep(0.001)


def test_a_trainer_that_writes_meanwhile_loses_nothing_and_writes_none_of_it(run: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append, args=(run, 200)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while (run / ROLLOUTS).stat().st_size < 4000:
        time.sleep(0.005)
    for uid in ("mine", "mate", "eves"):
        TrainerCopies(run).delete("trajectory", uid)
    for writer in writers:
        writer.join()
    found = left(run)[ROLLOUTS]
    assert found[0] == "other"
    assert len(found) == len(set(found)) == 401
