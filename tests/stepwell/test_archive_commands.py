"""The archive on the terminal, after the run: the questions of somebody who looks, in a command
each; and what operators do."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import orjson
import pytest

from stepwell.cli.main import main
from stepwell.config.load import load_config
from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock, boot_id
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.export import read
from stepwell.datapool.files.trained import TrainedTrajectory, write_trained
from stepwell.datapool.ops import OpenGroup
from stepwell.datapool.types import Trajectory
from stepwell.run.folder import RunFile, begin, read_run
from stepwell.show import trajectory
from tests.builders import step_of
from tests.datapool.conftest import JournaledPool
from tests.datapool.test_archive import Archived, private

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended; some of what left its pool was archived, and some waits."""
    folder = tmp_path / "mine"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=mine"]))
    run = Archived(folder)
    for i, reward in enumerate([0.0, 0.0, 1.0]):
        task = {"data_source": "gsm8k", "instance_id": "hard" if i < 2 else "easy"}
        run.pool("apply", OpenGroup(f"p-t{i}", 1, metadata=task))
        run.train(f"t{i}", f"question {i}", f"answer {i}", reward, version=10 + i)
    run.archive()
    run.turn("gone", "too hard?", "No idea.")
    run.pool("drop_group", "p-gone", "zero_variance")
    run.pool.journal.close()
    return folder


def told(capture: Capture, *argv: object, code: int = 0) -> str:
    assert main([*map(str, argv)]) == code
    out, err = capture.readouterr()
    return err if code == 2 else out


def test_why_it_was_dropped_and_what_the_model_said_is_one_command(
    run: Path, capsys: Capture
) -> None:
    shown = told(capsys, "show", "gone", run)
    assert "its group was dropped (zero_variance)" in shown
    answer = json.loads(told(capsys, "show", "gone", run, "--json"))
    assert answer["archived"]["drop_reason"] == "zero_variance"
    messages = json.loads(answer["branches"][0]["steps"][0]["metadata"])["messages"]
    assert messages[1]["content"] == "No idea."


def test_a_run_is_named_by_the_address_of_its_ray_too(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(where: str) -> tuple[Path, RunFile]:
        assert where == "10.0.0.2:6379"
        return run, read_run(run)

    monkeypatch.setattr("stepwell.show.run.find_run", find)
    assert "question 0" in told(capsys, "prompts", "10.0.0.2:6379")
    assert "question 0" in told(capsys, "data", "query", "", "10.0.0.2:6379")
    assert "all files are sound" in told(capsys, "archive", "check", "10.0.0.2:6379")


def test_which_prompts_never_get_a_reward_is_one_command(run: Path, capsys: Capture) -> None:
    shown = told(capsys, "prompts", run, "--never-rewarded")
    assert "[gsm8k] question 0" in shown
    assert "question 2" not in shown
    (row,) = json.loads(told(capsys, "prompts", run, "--never-rewarded", "--json"))
    assert (row["tries"], row["kind"]) == (2, "never")
    least = json.loads(told(capsys, "prompts", run, "--order", "first", "--ascending", "--json"))
    assert [row["first"] for row in least] == sorted(row["first"] for row in least)
    assert "there are time, tries" in told(capsys, "prompts", run, "--order", "size", code=2)


def test_a_query_lists_and_writes_what_passes(run: Path, capsys: Capture, tmp_path: Path) -> None:
    shown = told(capsys, "data", "query", "reward < 0.5 and version >= 11", run)
    assert "t1" in shown
    assert "question 1 → answer 1" in shown
    assert " · 1 turn · " in shown
    assert "t0" not in shown
    searched = json.loads(told(capsys, "data", "query", "", run, "--search", "idea", "--json"))
    assert [row["uid"] for row in searched] == ["gone"]
    for order, first in {"uid": "gone", "state": "gone", "first": "t0", "last": "t0"}.items():
        listed = told(capsys, "data", "query", "", run, "--order", order, "--ascending", "--json")
        rows = json.loads(listed)
        assert rows[0]["uid"] == first, order
        assert len(rows) == 4
    refused = told(capsys, "data", "query", "", run, "--order", "size", code=2)
    assert "--order is 'size'; there are time, uid," in refused
    refused = told(capsys, "data", "query", "", run, "--order", "relevance", code=2)
    assert "--order is relevance, which is of --search TEXT" in refused
    path = tmp_path / "some.parquet"
    told(capsys, "data", "query", "left == 'acked'", run, "--to", path)
    rewards = {each.trajectory.trajectory_uid: each.trajectory.reward for each in read(path)}
    assert rewards == {"t0": 0.0, "t1": 0.0, "t2": 1.0}
    path, last = tmp_path / "last.parquet", ("--order", "uid", "--limit", "2")
    told(capsys, "data", "query", "left == 'acked'", run, *last, "--to", path)
    assert [each.trajectory.trajectory_uid for each in read(path)] == ["t2", "t1"]
    path, found = tmp_path / "found.parquet", ("--search", "answer", "--order", "relevance")
    told(capsys, "data", "query", "", run, *found, "--to", path)
    assert sorted(each.trajectory.trajectory_uid for each in read(path)) == ["t0", "t1", "t2"]
    assert "no such column" in told(capsys, "data", "query", "rewards < 1", run, code=2)


def test_a_uids_beginning_and_a_groups_uid_are_opened(run: Path, capsys: Capture) -> None:
    assert "t0" in told(capsys, "show", "t", run)
    assert "answer 2" in told(capsys, "data", "query", "prompt == 'p-t2'", run)
    assert json.loads(told(capsys, "show", "p-t2", run, "--json"))["trajectory_uid"] == "t2"


def test_what_waits_is_opened_by_its_group_and_its_beginning(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_slow(*_: object) -> None: ...

    monkeypatch.setattr(trajectory, "archive_rest", is_slow)  # the archiver of a run that is alive
    for uid in ("gone", "p-gone", "gon"):
        assert "its group was dropped (zero_variance)" in told(capsys, "show", uid, run)


def test_what_is_live_is_opened_by_its_group_and_its_beginning(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=live"]))
    run = Archived(folder)
    for uid in ("conversation-1", "conversation-2"):
        first = run.turn(uid, f"hello\n from {uid}", "Hi.", "group")
        said = {"messages": [{"role": "assistant", "content": "No."}]}
        ids = {"prompt_ids": [*first.token_ids, 5], "response_ids": [6], "parent_index": 0}
        run.pool("submit_step", step_of(uid, "group", 1, metadata=said, **ids))
    run.pool.journal.close()
    assert "conversation-1" in told(capsys, "show", "conversation-1", folder)
    for begun in ("group", "conversation-", "gro"):
        shown = told(capsys, "show", begun, folder)
        assert "hello from conversation-1 → No." in shown
        assert "2 turns · 15 tokens" in shown, "tokens are counted once"
    assert told(capsys, "show", "conversation-2", folder).startswith("conversation-2  open")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_beginning_of_more_uids_than_are_listed_says_so(
    tmp_path: Path, capsys: Capture, leaves: bool
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    run = Archived(tmp_path)
    for i in range(25):
        run.turn(f"talk-{i:02}", "hello", "Hi.")
        if leaves:
            run.pool("drop_group", f"p-talk-{i:02}", "enough")
    run.pool.journal.close()
    for start in ("talk-", "p-talk-"):
        shown = told(capsys, "show", start, tmp_path)
        assert shown.count("Hi.") == 20
        assert "perhaps more begin so: give more of the uid" in shown
        assert json.loads(told(capsys, "show", start, tmp_path, "--json"))["may_be_more"]
    assert "perhaps" not in told(capsys, "show", "talk-0", tmp_path)


def test_what_was_said_is_shown_where_no_tokenizer_is(tmp_path: Path, capsys: Capture) -> None:
    """In a file, and in a run whose model was removed."""
    model = shutil.copytree(load_config("quickstart").model.path, tmp_path / "model")
    folder, file = tmp_path / "mine", tmp_path / "x.jsonl"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", f"model.path={model}"]))
    run = Archived(folder)
    run.turn("talk", "what is 東京?\nsay", "a city")
    for uid, kept in {"odd": {"messages": "text"}, "none": {}}.items():
        run.pool("submit_step", step_of(uid, uid, 0, metadata=kept, response_ids=[6]))
    run.pool.journal.close()
    shutil.rmtree(model)
    told(capsys, "data", "export", file, folder)
    for where in (folder, file):
        shown = told(capsys, "show", "talk", where)
        assert "· user: what is 東京?" in shown
        assert "· say" in shown
        assert "█ assistant: a city" in shown
        for uid in ("odd", "none"):
            assert "█ 6" in told(capsys, "show", uid, where)


def test_a_run_on_a_machine_without_its_model_has_the_tokenizer_of_its_weights(
    tmp_path: Path, capsys: Capture
) -> None:
    model = shutil.copytree(load_config("quickstart").model.path, tmp_path / "model")
    folder = tmp_path / "mine"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", f"model.path={model}"]))
    run = Archived(folder)
    run.turn("talk", "hello", "Hi.")
    run.pool.journal.close()
    here = told(capsys, "show", "talk", folder)
    shutil.copytree(model, folder / "weights" / "v3")
    shutil.rmtree(model)
    assert told(capsys, "show", "talk", folder) == here
    assert "no tokenizer" not in here


def test_why_a_trajectory_without_a_step_is_gone_is_said(tmp_path: Path, capsys: Capture) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    run = Archived(tmp_path)
    for uid in ("never", "live"):
        run.pool("apply", OpenGroup(f"p-{uid}", 2))
        run.pool("open_trajectory", uid, f"p-{uid}")
        run.pool("abort_trajectory", uid, "cancelled")
    run.pool("open_trajectory", "runs", "p-live")
    run.pool("drop_group", "p-never", "too_few_rollouts")
    run.pool.journal.close()
    for uid, why in {
        "never": "aborted (cancelled); its group was dropped (too_few_rollouts)",
        "live": "aborted (cancelled); its group is in the pool",
        "runs": "open; its group is in the pool",
    }.items():
        shown = told(capsys, "show", uid, tmp_path, code=2)
        assert f"trajectory {uid!r} has no step: {why}" in shown


def test_the_groups_of_a_run_that_has_ended_say_where_the_dropped_are_named(
    run: Path, capsys: Capture
) -> None:
    shown = told(capsys, "groups", run)
    assert "dropped 1  zero_variance 1" in shown
    (query,) = re.findall(r"stepwell data query \"(.*)\"", shown)
    assert "gone" in told(capsys, "data", "query", query, run)


def test_a_folder_in_the_place_of_a_uid_is_told_apart(run: Path, capsys: Capture) -> None:
    said = told(capsys, "show", run, code=2)
    assert f"UID is {run}, the folder of a run" in said
    assert f"stepwell show UID {run}" in said


def test_what_is_deleted_is_said_to_be(run: Path, capsys: Capture) -> None:
    assert "deleted 1 trajectories" in told(capsys, "data", "delete", run, "--trajectory", "t1")
    assert "'t1' was deleted at" in told(capsys, "show", "t1", run, code=2)
    assert "'t1' was deleted at" in told(capsys, "show", "t1", run, code=2)
    shown = told(capsys, "archive", "delete", run, "--trajectory", "t2")
    assert "not reached: copies" in shown
    everything = b"".join(
        p.read_bytes() for p in run.rglob("*") if p.suffix in (".parquet", ".log")
    )
    assert b"question 1" not in everything
    assert "are sound" in told(capsys, "archive", "check", run)


def test_check_names_a_damaged_file(run: Path, capsys: Capture) -> None:
    told(capsys, "prompts", run)
    (path, *_) = (run / "archive" / "trajectories").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in told(capsys, "archive", "check", run, code=1)


def test_a_run_without_an_archive_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "pool.archive.enabled=false"]))
    assert "has no archive" in told(capsys, "prompts", folder, code=2)


def test_what_a_run_without_an_archive_left_is_imported_once(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=old"]))
    JournaledPool(folder / "pool").journal.close()
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]
    steps = (
        step_of("kept", "g", 0, metadata={"messages": messages}),
        step_of("kept", "g", 1, prompt_ids=[1, 2, 3, 4, 5, 6], parent_index=0, reward=1.0),
    )
    kept = TrainedTrajectory(Trajectory("kept", "g", steps), ({}, {}))
    write_trained(folder, 3, {"groups": 1}, [kept], 1 << 20)
    row = {"step": 3, "version": 2, "prompt": "2+3?", "response": "It is 6.", "reward": 0.0}
    rows = [
        row | {"trajectory_uid": "text", "prompt_uid": "g", "data_source": "sums", "step": 2},
        row | {"trajectory_uid": "text", "prompt_uid": "g", "data_source": "sums"},
        row | {"trajectory_uid": "kept", "prompt_uid": "g"},
    ]
    lines = b"".join(orjson.dumps(r) + b"\n" for r in rows)
    (folder / "rollouts.jsonl").write_bytes(lines + b'{"half a li')
    done = json.loads(told(capsys, "archive", "import", folder, "--json"))
    assert done == {"with_tokens": 1, "as_text": 1, "known": 0}
    again = json.loads(told(capsys, "archive", "import", folder, "--json"))
    assert again == {"with_tokens": 0, "as_text": 0, "known": 2}
    # An import that was killed after it wrote the files: the catalogue does not know them.
    (folder / "archive" / "catalogue-0.sqlite").unlink()
    assert json.loads(told(capsys, "archive", "import", folder, "--json")) == again
    reader = ArchiveReader(folder / "archive")
    exact = reader.read("kept")
    assert exact is not None
    for ours, theirs in zip(steps, exact.trajectory.steps, strict=True):
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
    assert exact.trajectory.reward == 1.0
    (found,) = reader.find("text")
    assert (found["first"], found["last"], found["reward"]) == ("2+3?", "It is 6.", 0.0)
    assert (found["version"], found["tokens"], found["data_source"]) == (2, 0, "sums")
    assert "It is 6." in json.dumps(told(capsys, "show", "text", folder, "--json"))
    assert [r["uid"] for r in json.loads(told(capsys, "data", "query", "", folder, "--json"))] == [
        "kept",
        "text",
    ]
    assert reader.check() == []
    told(capsys, "data", "query", "", folder, "--to", tmp_path / "all.parquet")
    assert [t.trajectory.trajectory_uid for t in read(tmp_path / "all.parquet")] == ["kept"]


def test_a_user_goes_on_after_a_deletion_where_the_pools_clock_is_behind(
    tmp_path: Path, capsys: Capture
) -> None:
    """A pool does not count the time in which its machine was suspended."""
    folder = tmp_path / "mine"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=mine"]))
    for uid, at in (("before", time.time() - 3600.0), ("after", time.time() - 1800.0)):
        run = Archived(folder)
        run.pool.now = at
        clock = Clock(boot_id(), at + 60.0 - time.monotonic())
        run.pool.journal.put_state(CLOCK, clock.dump())
        private(run, uid)
        run.pool("ack", run.pool("lease_batch", 1).lease_id)
        run.archive()
        run.pool.journal.close()
        if uid == "before":
            told(capsys, "archive", "delete", folder, "--user", "eve")
            assert "'before' was deleted at" in told(capsys, "show", "before", folder, code=2)
    assert "after  complete  reward 1.000" in told(capsys, "show", "after", folder)
    assert "deleted 1 trajectories" in told(capsys, "archive", "delete", folder, "--user", "eve")


def test_what_is_imported_is_deleted_by_its_user(tmp_path: Path, capsys: Capture) -> None:
    """The group's metadata named the user, and is not in the files."""
    folder = tmp_path / "old"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=old"]))
    JournaledPool(folder / "pool").journal.close()
    kept = Trajectory("kept", "g", (step_of("kept", "g", 0),))
    write_trained(folder, 3, {"groups": 1}, [TrainedTrajectory(kept, ({},), "ann")], 1 << 20)
    row = {"prompt": "2+3?", "response": "It is 6.", "trajectory_uid": "text", "user": "ann"}
    (folder / "rollouts.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    told(capsys, "archive", "import", folder)
    rows = json.loads(told(capsys, "data", "query", "user == 'ann'", folder, "--json"))
    assert {each["uid"] for each in rows} == {"kept", "text"}
    told(capsys, "archive", "delete", folder, "--user", "ann")
    assert json.loads(told(capsys, "data", "query", "", folder, "--json")) == []


def test_a_run_that_left_nothing_is_imported_as_an_error(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=none"]))
    assert "neither rollouts.jsonl nor trained/" in told(
        capsys, "archive", "import", folder, code=2
    )
    (folder / "rollouts.jsonl").write_text('{"step": 1}\n')
    assert "line 1 is no rollout" in told(capsys, "archive", "import", folder, code=2)
