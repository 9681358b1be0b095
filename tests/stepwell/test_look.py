"""Output of the commands that look into a run, for one that has ended; for a live one:
`test_connect.py`."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import shutil
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from stepwell import Step, Trajectory, load_config
from stepwell.cli.main import main
from stepwell.datapool import DataPoolClient
from stepwell.datapool.errors import JournalError, JournalLockedError, PoolUnavailableError
from stepwell.datapool.files.trained import TRAINED, TrainedTrajectory, write_trained
from stepwell.datapool.ops import AbortTrajectory
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.datapool.sealed import sealed
from stepwell.datapool.store.reading import StoppedJournal
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.ui.run_folder import RunFolder
from stepwell.run.folder import GatewayPart, begin, only_run_in, read_run
from stepwell.show.run import RunView
from stepwell.show.status import read_status, status_screen
from stepwell.show.trajectory import read_groups
from tests.datapool.conftest import JournaledPool

Capture = pytest.CaptureFixture[str]

SAID = "<|im_start|>user\n1 + 1 =\x1b[31m<|im_end|>\n<|im_start|>assistant\n"
ROOT = {"prompt_uid": "sums", "trajectory_uid": "tree"}
RECORD = {
    "step": 7,
    "policy_version": 3,
    "reward/mean": 0.5,
    "loss": -0.25,
    "staleness/mean": 1.5,
    "tokens_per_s": 1234.0,
    "wait/trainer_starved": 0.25,
    "wait/generation_saturated": 0.0,
    "val/step": 7.0,
    "val/score": 1.0,
    "val/rollouts": 1.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended: a tree of three turns, a flat group, one dropped, one running."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    config = load_config("quickstart", [f"run.dir={folder}", "run.name=mine"])
    begin(config)
    asyncio.run(_fill(folder / "pool", ChatTokenizer.load(str(config.model.path))))
    before = {"step": 0, "val/step": 0.0, "val/score": 0.0, "val/rollouts": 1.0}
    whole = (sealed(json.dumps(record).encode()) for record in (before, RECORD))
    (folder / "metrics.jsonl").write_bytes(b"".join(whole) + b'{"step": 8, "torn')
    return folder


def tree(tokenizer: ChatTokenizer) -> list[Step]:
    """A question answered twice, the first answer followed by another turn."""
    prompt = tokenizer.encode(SAID).tolist()
    first, second = tokenizer.encode("two").tolist(), tokenizer.encode("2").tolist()
    asked = tokenizer.encode(" sure?").tolist()
    known = {"rollout_log_probs": [-0.5] * len(second), "policy_version": 3}
    return [
        Step(prompt_ids=prompt, response_ids=first, step_index=0, **ROOT),
        Step(
            prompt_ids=[*prompt, *first, *asked],
            response_ids=second,
            step_index=1,
            parent_index=0,
            **known,
            **ROOT,
        ),
        Step(
            prompt_ids=prompt,
            response_ids=second,
            step_index=2,
            reward=0.5,
            metadata={"branch": "resampled"},  # as the gateway says it
            **known,
            **ROOT,
        ),
    ]


async def _fill(folder: Path, tokenizer: ChatTokenizer) -> None:
    async with DataPoolClient.local(folder=folder) as pool:
        await pool.submit_steps(tree(tokenizer))
        await pool.complete_trajectory("tree", 1.0)
        await pool.mark(trajectory_uid="tree", tags=["ann"], note="look")
        for uid in ("flat", "gone", "runs"):
            await pool.open_group(uid, 2)
            await pool.submit_step(
                Step(prompt_ids=[1], response_ids=[2], prompt_uid=uid, trajectory_uid=f"{uid}-0")
            )
        await pool.complete_trajectory("flat-0", 0.0)
        await pool.call(AbortTrajectory("runs-0", "the tool was down"))
        await pool.drop_group("gone", "too long")


def said(capture: Capture, *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    out, err = capture.readouterr()
    if code:
        assert len(err.splitlines()) == 1, err
        return err
    assert not err
    return out


def told(capture: Capture, *argv: str) -> Any:
    return json.loads(said(capture, *argv, "--json"))


def test_show_has_the_journals_tokens_and_what_is_trained_of_them(
    run: Path, capsys: Capture
) -> None:
    steps = tree_steps()
    branches = told(capsys, "show", "tree", str(run))["branches"]
    assert [b["input_ids"] for b in branches] == [
        steps[1].token_ids.tolist(),
        steps[2].token_ids.tolist(),
    ]
    n = len(steps[0].prompt_ids)
    first = [*steps[0].response_ids]
    trained = [0] * n + [1] * len(first) + [0] * (len(steps[1].prompt_ids) - n - len(first)) + [1]
    assert branches[0]["loss_mask"] == trained
    assert branches[1]["loss_mask"] == [0] * n + [1] * len(steps[2].response_ids)
    assert branches[1]["reward"] == 1.5


def test_show_tells_what_is_trained_without_colours_and_moves_no_cursor(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = said(capsys, "show", "tree", str(run))
    assert "  0 ─ 1\n  2  resampled\n" in out, "the tree"
    assert "· 1 + 1 =\\x1b[31m" in out
    assert "\\n" not in out, "tokens have lines"
    assert "\x1b" not in out
    assert "█ two" in out
    assert "·  sure?" in out
    assert "█ 2" in out
    assert "#ann" not in out
    assert "look" in out
    assert max(map(len, out.splitlines())) <= 80
    lines = said(capsys, "show", "tree", str(run), "--tokens").splitlines()
    assert lines[0] == "branch 0"
    assert sum("█" in line for line in lines) == sum(len(s.response_ids) for s in tree_steps())


def test_what_was_trained_and_kept_is_shown_with_what_was_trained_of_it(
    run: Path, capsys: Capture
) -> None:
    steps = tuple(replace(step, trajectory_uid="old") for step in tree_steps())
    columns: list[dict[str, Any]] = [
        {
            "mask": np.ones(len(step.response_ids)),
            "advantages": np.full(len(step.response_ids), 2.0),
        }
        for step in steps
    ]
    columns[0]["mask"][1:] = 0
    columns[2] = {}
    trained = TrainedTrajectory(Trajectory("old", "sums", steps), tuple(columns))
    write_trained(run, 5, {"groups": 1}, [trained], 1 << 20)
    try:
        found = told(capsys, "show", "old", str(run))
        assert found["trained"] == {"step": 5, "advantage": 2.0, "weight": None}
        n = len(steps[0].prompt_ids)
        masks = [sum(branch["loss_mask"]) for branch in found["branches"]]
        assert masks == [1 + len(steps[1].response_ids), 0]
        assert found["branches"][0]["loss_mask"][n : n + 2] == [1, 0]
        assert "trained at optimizer step 5 · advantage +2.000" in said(
            capsys, "show", "old", str(run)
        )
        assert main(["show", "other", str(run)]) == 2
        assert f"{run / TRAINED}; the newest there is old of step 5" in capsys.readouterr().err
    finally:
        shutil.rmtree(run / TRAINED)


def test_what_is_known_of_a_trajectory_that_nobody_kept_is_said(run: Path, capsys: Capture) -> None:
    told = said(capsys, "show", "gone-0", str(run), code=2)
    assert "'gone-0' nothing is kept any more: its group was dropped (too long)" in told


def tree_steps() -> list[Step]:
    return tree(ChatTokenizer.load(str(load_config("quickstart").model.path)))


def test_what_is_trained_is_said_only_of_what_was_trained(run: Path, capsys: Capture) -> None:
    waits = said(capsys, "show", "tree", str(run))
    assert "tokens in the loss mask" in waits
    assert "trained" not in waits
    steps = tuple(replace(step, trajectory_uid="old") for step in tree_steps())
    columns = tuple({"mask": np.ones(len(step.response_ids))} for step in steps)
    trained = TrainedTrajectory(Trajectory("old", "sums", steps), columns)
    write_trained(run, 5, {"groups": 1}, [trained], 1 << 20)
    try:
        was = said(capsys, "show", "old", str(run))
        assert was.startswith("old  trained  reward")
        assert "group sums (trained)" in was
        assert "tokens trained" in was
    finally:
        shutil.rmtree(run / TRAINED)


@pytest.mark.parametrize("columns", ["80", "60", "160"])
def test_uids_can_be_copied_whole_however_narrow_the_terminal_is(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=long"]))
    prompts = [f"prompt-{i:032x}" for i in range(2)]

    async def fill() -> None:
        async with DataPoolClient.local(folder=folder / "pool") as pool:
            for prompt in prompts:
                names = {"prompt_uid": prompt, "trajectory_uid": f"{prompt}-0"}
                await pool.submit_step(Step(prompt_ids=[1], response_ids=[2], **names))
                await pool.mark(prompt, tags=["a-tag", "another-tag", "third"])

    asyncio.run(fill())
    monkeypatch.setenv("COLUMNS", columns)
    listed = said(capsys, "groups", str(folder))
    assert [uid for uid in prompts if uid not in listed.split()] == [], listed
    one = said(capsys, "groups", str(folder), "--prompt", prompts[0])
    assert f"{prompts[0]}-0" in one.split()
    for line in (listed + one).splitlines():
        assert len(line.rstrip()) <= int(columns)


def test_colours_are_for_terminals_that_want_them(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in said(capsys, "show", "tree", str(run))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in said(capsys, "show", "tree", str(run))


def test_groups_are_filtered_and_what_was_dropped_has_its_reason(
    run: Path, capsys: Capture
) -> None:
    everything = told(capsys, "groups", str(run))
    assert [g["prompt_uid"] for g in everything["groups"]] == ["sums", "flat", "runs"]
    assert everything["counts"]["drop_reasons"] == {"too long": 1}
    ready = told(capsys, "groups", str(run), "--state", "ready", "--min-reward", "1")
    assert [(g["prompt_uid"], g["reward_mean"]) for g in ready["groups"]] == [("sums", 1.5)]
    assert told(capsys, "groups", str(run), "--limit", "1")["more"]
    one = told(capsys, "groups", str(run), "--prompt", "runs")
    (trajectory,) = one["trajectories"]
    assert (trajectory["state"], trajectory["reason"]) == ("aborted", "the tool was down")
    screen = said(capsys, "groups", str(run), "--prompt", "runs")
    assert "dropped 1  too long 1" in screen
    assert "the tool was down" in screen
    assert "0 of 2 complete" in screen
    other = said(capsys, "groups", str(run), "--prompt", "runs", "--state", "ready")
    assert "no group of channel train passes" in other
    assert "the tool was down" in other


async def test_a_leased_group_is_listed_with_the_rewards_that_the_trainer_gave(
    tmp_path: Path,
) -> None:
    """Wherever the run's command was started."""
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    write_trained(tmp_path, 5, {"groups": 1, "rewards": {"sums": [0.5]}}, [], 1 << 20)
    async with DataPoolClient.local() as pool:
        await pool.open_group("sums", 1)
        await pool.submit_step(
            Step(prompt_ids=[1], response_ids=[2], prompt_uid="sums", trajectory_uid="a")
        )
        await pool.complete_trajectory("a")
        assert await pool.lease_batch() is not None
        view = RunView(tmp_path, read_run(tmp_path), True, pool, RunFolder(tmp_path))
        (group,) = (await read_groups(view, "train", {}))["groups"]
    assert (group["state"], group["reward_mean"]) == ("leased", 0.5)


def test_json_has_null_for_what_is_no_number(tmp_path: Path, capsys: Capture) -> None:
    """The group of a row whose answer is NaN has one."""
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))

    async def fill() -> None:
        async with DataPoolClient.local(folder=tmp_path / "pool") as pool:
            await pool.open_group("sums", 1, metadata={"task": {"answer": [float("nan"), 1.5]}})

    asyncio.run(fill())
    text = said(capsys, "groups", str(tmp_path), "--json")
    (group,) = json.loads(text, parse_constant=pytest.fail)["groups"]
    assert group["metadata"]["task"]["answer"] == [None, 1.5]


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: Capture) -> None:
    """And never read as what rich makes of brackets."""

    async def fill() -> None:
        async with DataPoolClient.local(folder=tmp_path / "pool") as pool:
            for uid in ("sums[easy]", "sums[/easy]", "\x1b[2Jgone"):
                await pool.open_group(uid, 1)

    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    asyncio.run(fill())
    screen = said(capsys, "groups", str(tmp_path))
    assert "sums[easy]" in screen
    assert "sums[/easy]" in screen
    for text in (screen, said(capsys, "status", str(tmp_path))):
        assert "\x1b[2J" not in text
        assert "\\x1b[2Jgone" in text


def test_no_name_of_a_trajectory_moves_the_cursor_or_begins_a_line(
    tmp_path: Path, capsys: Capture
) -> None:
    names = {"trajectory_uid": "\x1b[2Jt", "prompt_uid": "\x1b]0;p\x07\ntrainer  alive"}
    ids = {"prompt_ids": [1], "rollout_log_probs": None}
    steps = [
        Step(**ids, response_ids=[2], **names, metadata={"branch": "\x1b[31m\na", "x": math.nan}),
        Step(**ids, response_ids=[3], **names, step_index=1),
    ]

    async def fill() -> None:
        async with DataPoolClient.local(folder=tmp_path / "pool") as pool:
            await pool.submit_steps(steps)
            await pool.complete_trajectory(names["trajectory_uid"], 1.0)

    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    asyncio.run(fill())
    screen = said(capsys, "show", names["trajectory_uid"], str(tmp_path))
    assert "\x1b" not in screen
    assert "\\x1b[2Jt" in screen
    assert "group \\x1b]0;p\\x07\\ntrainer  alive" in screen
    assert "\\x1b[31m\\na" in screen


@pytest.mark.parametrize("answer", [b"SSH-2.0-other\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>"])
def test_what_is_no_gateway_is_told(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: _say_once(server, answer), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match="no gateway"):
            GatewayPart(urls=(url,)).ask(url, "/statistics")


def test_a_gateway_is_asked_past_a_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        threading.Thread(target=lambda: _say_once(server, answer), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert GatewayPart(urls=(url,)).ask(url, "/statistics") == {}


def _say_once(server: socket.socket, answer: bytes) -> None:
    peer, _ = server.accept()
    with peer:
        peer.recv(4096)
        peer.sendall(answer)


def test_status_is_one_screen_of_what_the_files_say(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(capsys, "status", str(run))
    assert (found["state"], found["trainer"]["last"]) == ("ended", RECORD)
    assert found["pool"]["train"]["groups"]["dropped"] == 1
    without = {"low": None, "high": None, "version": None, "oldest_version": None}
    assert found["evaluations"] == [
        {"step": 0, "score": 0.0, "rollouts": 1} | without,
        {"step": 7, "score": 1.0, "rollouts": 1} | without,
    ]
    monkeypatch.setenv("COLUMNS", "80")
    screen = said(capsys, "status", str(run)).replace("\xa0", " ")
    for words in (
        "mine  ended",
        "step 7",
        "reward 0.500",
        "0.000 of 1 at step 0 → 1.000 of 1 at step 7",
        "the trainer waits for groups 25% of its time",
        "dropped in train  too long 1",
        "open in train  flat  1 of 2 complete; 1 trajectories were not started",
    ):
        assert words in screen
    assert max(map(len, screen.splitlines())) <= 80
    assert len(screen.splitlines()) <= 24


def test_looking_changes_no_byte_and_needs_no_leave_to_write(run: Path, capsys: Capture) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for command in (["status"], ["groups"], ["show", "tree"]):
        said(capsys, *command, str(run))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_stopped_pool_answers_questions_alone(run: Path) -> None:
    async def look() -> None:
        pool = stopped_pool(run)
        assert (await pool.dry_run()).decisions[0].prompt_uid == "sums"
        with pytest.raises(PoolUnavailableError, match="LeaseBatch needs a running pool"):
            await pool.lease_batch()
        async with DataPoolClient.local(folder=run / "pool"):
            with pytest.raises(JournalLockedError, match="in use by process"):
                StoppedJournal(run / "pool")

    asyncio.run(look())


def test_a_folder_that_no_pool_wrote_holds_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=re.escape(f"{tmp_path} holds no journal")):
        StoppedJournal(tmp_path)


def test_the_shards_of_a_stopped_pool_are_one(tmp_path: Path) -> None:
    async def look() -> None:
        for k, prompt_uid in enumerate(("a", "c")):
            async with DataPoolClient.local(folder=tmp_path / f"shard-{k}") as pool:
                step = Step(
                    prompt_ids=[1], response_ids=[2], prompt_uid=prompt_uid, trajectory_uid="t"
                )
                await pool.submit_step(step)
        pool = stopped_pool(tmp_path)
        first = await pool.list_groups()
        second = await pool.list_groups(cursor=first.cursor)
        assert [row.prompt_uid for row in (*first.items, *second.items)] == ["a", "c"]
        assert (await pool.get_statistics("train"))["groups"]["open"] == 2

    asyncio.run(look())


def test_what_is_exported_is_shown_from_the_file_too(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = str(tmp_path / "x.jsonl")
    assert "1 trajectories, 3 steps" in said(
        capsys, "data", "export", file, str(run), "--min-reward", "1"
    )
    of_run = told(capsys, "show", "tree", str(run))
    assert told(capsys, "show", "tree", file) == of_run
    assert "give --overwrite" in said(capsys, "data", "export", file, str(run), code=2)
    assert "OpenGroup needs a running pool" in said(
        capsys, "data", "import", file, str(run), code=1
    )


TAKE_A_FOLDER = [
    ["status"],
    ["top", "--json"],
    ["groups"],
    ["view"],
    ["doctor"],
    ["show", "tree"],
    ["eval"],
    ["rollback"],
    ["data", "salvage"],
    ["data", "export", "new.jsonl"],
]


def test_show_finds_an_aborted_trajectory_with_its_reason_and_what_was_sampled(
    run: Path, capsys: Capture
) -> None:
    told = said(capsys, "show", "runs-0", str(run))
    assert "aborted" in told
    assert "the tool was down" in told
    assert "step 0 · version 0 · prompt 1 · response 1" in told


def test_show_opens_a_group_by_its_uid(run: Path, capsys: Capture) -> None:
    told = said(capsys, "show", "runs", str(run))
    assert "runs-0" in told
    assert "its group is in the pool" in told


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("run.seed=0", "has no journal"),
        ("pool.durability=none", "has pool.durability none"),
    ],
)
@pytest.mark.parametrize("command", ["status", "groups", "view", "show tree"])
def test_a_run_without_a_journal_says_why_it_has_none(
    tmp_path: Path, capsys: Capture, override: str, why: str, command: str
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", override]))
    told = said(capsys, *command.split(), str(tmp_path), code=2)
    assert f"the run in {tmp_path} {why}" in told
    assert "start it again" in told


def test_a_place_that_may_not_be_written_is_one_line(run: Path, capsys: Capture) -> None:
    """/sys: there root may not either."""
    told = said(capsys, "data", "export", "/sys/x.jsonl", str(run), code=1)
    assert "/sys/x.jsonl" in told
    assert "may not be read or written" in told


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        *(([*argv, "nowhere"], "nowhere does not exist") for argv in TAKE_A_FOLDER),
        (["status", "FILE"], "run.json is a file, not a folder"),
        (["status", "RUN/pool"], "pool is no run's folder: it has no run.json"),
        (["data", "salvage", "RUN/logs"], "logs holds no journal"),
        (["data", "delete", "RUN/logs", "--tag", "x"], "logs holds no journal"),
        (["export", "nowhere", "--to", "new"], "nowhere does not exist"),
        (["export", "RUN", "--to", "new"], "checkpoints has no checkpoint"),
        (["export", "RUN", "--step", "7", "--to", "new"], "checkpoints has no step_7; steps: none"),
        (["export", "RUN", "--to", "RUN"], "which exists; name a new folder"),
        (["eval", "RUN", "--step", "7"], "checkpoints has no step_7; steps: none"),
        (["data", "delete", "nowhere", "--tag", "x"], "nowhere does not exist"),
        (["train", "--attach", "nowhere"], "nowhere does not exist"),
        (["show", "nobody", "RUN"], "trajectory 'nobody' is not in the pool"),
        (["show", "tree", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["groups", "RUN", "--prompt", "none"], "--prompt is 'none'"),
        (["groups", "RUN", "--channel", "none"], "this run has train, val"),
        (["groups", "RUN", "--limit", "0"], "--limit is 0"),
        (["top", "RUN"], "needs a terminal"),
        (["top", "RUN", "--interval", "0"], "--interval is 0"),
        (["data", "import", "nowhere.parquet", "RUN"], "there is no file nowhere.parquet"),
        (["data", "export", "nowhere/x.jsonl", "RUN"], "there is no folder nowhere"),
        (["data", "query", "", "RUN", "--to", "nowhere/x.jsonl"], "there is no folder nowhere"),
        (["data", "delete", "RUN", "--tag", "ann", "--exports", "x.jsonl"], "x.jsonl, which is no"),
        (["view", "RUN", "--port", "99999"], "--port is 99999"),
        (["doctor", "--engine", "localhost:30000"], "write http://host:port"),
        (["doctor", "--engine", "http://localhost:99999"], "write http://host:port"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    run: Path, capsys: Capture, argv: list[str], why: str
) -> None:
    (run / "logs").mkdir(exist_ok=True)
    named = {"RUN": str(run), "FILE": str(run / "run.json")}
    argv = [named.get(a) or a.replace("RUN/", f"{run}/") for a in argv]
    assert why in said(capsys, *argv, code=2)


def test_the_run_that_is_meant_is_found(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no run in" in said(capsys, "status", code=2)
    monkeypatch.chdir(run)
    assert told(capsys, "status")["run"] == "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(run.parent)
    assert told(capsys, "status")["run"] == "mine"


def test_of_several_runs_that_are_alive_one_has_to_be_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as alive:
        for name in ("one", "two"):
            folder = tmp_path / "runs" / name
            alive.enter_context(only_run_in(folder))
            begin(load_config("quickstart", [f"run.dir={folder}"]))
        found = said(capsys, "status", code=2)
    assert "several runs are alive; name one: runs/one, runs/two" in found


async def test_a_pool_that_does_not_answer_is_told_with_the_rest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        async def get_statistics(self) -> Any:
            await asyncio.sleep(60)

    monkeypatch.setattr("stepwell.show.status.ANSWER_S", 0.01)
    view = RunView(run, read_run(run), True, cast(Any, Silent()), RunFolder(run))
    status = await read_status(view)
    assert status["pool"] == {"error": "no answer in 0.01 s"}
    assert status["state"] == "ended", "nobody holds its lock"
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(status_screen(status, status))
    assert "the pool does not answer: no answer in 0.01 s" in console.export_text()


async def test_a_run_whose_folder_is_on_another_machine_is_shown_by_what_answers(
    tmp_path: Path,
) -> None:
    """`stepwell status HOST:PORT` finds it."""
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=mine"]))
    there = tmp_path / "nowhere"
    async with DataPoolClient.local() as pool:
        await pool.open_group("sums", 1)
        view = RunView(there, read_run(tmp_path), True, pool, RunFolder(there))
        status = await read_status(view)
        listed = await read_groups(view, "train", {})
    assert (status["state"], status["disk"], status["pool"]["train"]["groups"]["open"]) == (
        "alive",
        None,
        1,
    )
    assert [group["prompt_uid"] for group in listed["groups"]] == ["sums"]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(status_screen(status))
    screen = console.export_text()
    assert "not on this machine" in screen
    assert "nobody trains" not in screen


def test_the_screen_of_a_run_that_nobody_has_called_yet(run: Path, capsys: Capture) -> None:
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    quiet = {"calls": 0, "p50_ms": None, "p99_ms": None}
    gateway = {
        "url": "http://here",
        "calls": {},
        "limits": {"running": 0, "waiting": 0},
        "added_latency": quiet,
        "recording": {"unrecorded_share": 0.0},
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(status_screen({**status, "gateways": [gateway]}))
    [line] = [x for x in console.export_text().splitlines() if x.startswith("gateway")]
    assert " ".join(line.split()).endswith("up 0 calls · 0 running")


def test_a_rate_is_that_of_its_replica_and_none_of_what_did_not_answer_before(
    run: Path, capsys: Capture
) -> None:
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)

    def replica(name: str, calls: int) -> dict[str, Any]:
        return {
            "url": f"http://{name}",
            "calls": {"calls": calls},
            "limits": {"running": 0, "waiting": 0},
            "added_latency": {"calls": 0},
            "recording": {"unrecorded_share": 0.0},
        }

    def at(second: int, gateways: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
        return status | {"at": f"2026-11-28T12:00:{second:02}+00:00", "gateways": gateways} | parts

    lost = {"url": "http://lost", "error": "refused"}
    replicas = [replica("one", 1000), replica("two", 5000), lost]
    before = at(0, replicas, pool={"error": "no answer"})
    now = at(10, [replica("one", 1020), replica("two", 5300), replica("lost", 70_000)])
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(status_screen(now, before))
    screen = console.export_text().replace("\xa0", " ")
    rates = [line.split("calls")[1] for line in screen.splitlines() if "http://" in line]
    assert [rate.split(" ·")[0] for rate in rates] == [" (2.0/s)", " (30.0/s)", ""]
    (train,) = [line for line in screen.splitlines() if line.startswith("train ")]
    assert "/s" not in train
    console.print(status_screen(at(10, []), at(0, [])))
    assert "(0.0/s)" in console.export_text()


@pytest.mark.parametrize(
    ("share", "told"), [(0.0, ""), (1 / 3000, "a few not recorded"), (0.25, "25.0% not recorded")]
)
def test_a_share_below_a_tenth_of_a_percent_is_no_number(
    run: Path, capsys: Capture, share: float, told: str
) -> None:
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    gateway = {
        "url": "http://here",
        "calls": {},
        "limits": {"running": 0, "waiting": 0},
        "added_latency": {"calls": 0},
        "recording": {"unrecorded_share": share},
    }
    console = Console(width=120, file=io.StringIO(), record=True, force_terminal=True)
    console.print(status_screen({**status, "gateways": [gateway]}))
    screen = console.export_text(styles=True)
    [line] = [line for line in screen.splitlines() if "http://here" in line]
    assert told in line
    assert ("not recorded" in line) == bool(told)
    assert ("\x1b[31m" in line) == (share > 0.1), "only what is wrong is red"


def test_evaluations_of_live_traffic_have_versions_rollouts_and_an_interval(
    tmp_path: Path, capsys: Capture
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "run.name=live"]))
    JournaledPool(tmp_path / "pool").journal.close()

    def evaluated(step: int, n: int, oldest: int, score: float) -> dict[str, Any]:
        own = {"val/step": step, "val/version": step, "val/score": 1.0, "val/rollouts": 4}
        several = {"val/pooled/rollouts": n, "val/pooled/oldest_version": oldest}
        bounds = {"val/pooled/score": score, "val/pooled/low": 0.4, "val/pooled/high": 0.7}
        return RECORD | {"step": step} | own | several | (bounds if n >= 30 else {})

    records = [evaluated(1, 4, 1, 0.0), evaluated(3, 30, 1, 0.5), evaluated(5, 32, 4, 0.6)]
    lines = [sealed(json.dumps(record).encode()) for record in records]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    screen = " ".join(said(capsys, "status", str(tmp_path)).replace("\xa0", " ").split())
    assert "0.500 (0.40 to 0.70) of 30, v1-3 at step 3 → " in screen
    assert "0.600 (0.40 to 0.70) of 32, v4-5 at step 5" in screen
    (tmp_path / "metrics.jsonl").write_bytes(lines[0])
    screen = " ".join(said(capsys, "status", str(tmp_path)).replace("\xa0", " ").split())
    assert "of 4 rollouts, too few to say, v1" in screen


@pytest.mark.parametrize("has_consumer", [False, True])
def test_the_screen_says_at_once_that_no_trainer_has_come(
    run: Path, capsys: Capture, has_consumer: bool
) -> None:
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    status |= {"state": "alive", "trainer": {**status["trainer"], "pid": None}}
    status["pool"]["train"] |= {"ready": 23, "has_consumer": has_consumer}
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(status_screen(status))
    [line] = [x for x in console.export_text().splitlines() if x.startswith("trainer")]
    assert "nobody trains" in line
    assert (
        "23 groups wait for a first trainer (stepwell train --attach" in line
    ) is not has_consumer
