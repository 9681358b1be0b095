"""`stepwell train` as a user runs it: what it leaves behind, how it stops, how it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepwell.cli.main import main
from stepwell.datapool.files.trained import read_trained, trained_steps
from stepwell.trainer.ledger import LEDGER, audit
from stepwell.trainer.metrics import read_metrics
from tests.documented_metrics import documented, undocumented, unseen
from tests.e2e.commands import start
from tests.e2e.conftest import ROOT, SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def command(folder: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "stepwell",
        "train",
        "--config",
        "quickstart",
        *SMALL,
        f"run.dir={folder}",
        *overrides,
    ]


def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def run_here(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported torch and transformers already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), redirect_stdout(out), redirect_stderr(err):
        status = main(argv[argv.index("stepwell") + 1 :])
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())


def records_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


@dataclass(frozen=True)
class Interrupted:
    """A run that a signal ended after its first optimizer step, or soon after it."""

    folder: Path
    status: int | None
    """None: it had not ended two minutes after the signal."""
    output: str
    children: list[psutil.Process]
    """Its processes while it trained."""
    step: int
    """The last optimizer step that it took."""


def interrupt(folder: Path, number: signal.Signals, *overrides: str) -> Interrupted:
    log = folder.with_suffix(".txt")
    argv = command(folder, "trainer.total_steps=1000", *overrides)
    process = start(*argv[argv.index("stepwell") + 1 :], log=log)
    try:
        while "step    1" not in log.read_text():
            if not process.is_alive():
                pytest.fail(f"training never started:\n{log.read_text()}")
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        if number == signal.SIGTERM:
            os.kill(process.pid, number)
        else:  # to the whole foreground group, as a terminal does
            os.killpg(process.pid, number)
        if number == signal.SIGHUP:
            os.kill(process.pid, number)  # and its shell
        process.join(120)
        status = process.exitcode
    finally:
        process.kill()
        process.join()
    step = records_of(folder)[-1]["step"]
    return Interrupted(folder, status, log.read_text(), children, step)


def recorded(folder: Path) -> str:
    return f"trainer.save_debug_rollout_data={folder / 'batches'}"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """A run that Ctrl-C ended, its batches recorded."""
    folder = tmp_path_factory.mktemp("run")
    return interrupt(folder, signal.SIGINT, recorded(folder))


@dataclass(frozen=True)
class Resumed:
    """A run that was interrupted, and ended by itself when it was started again."""

    folder: Path
    began: int
    """The optimizer step that it went on from."""
    last: int
    """The optimizer step that it ended with."""


@pytest.fixture(scope="module")
def resumed(interrupted: Interrupted) -> Resumed:
    """Two optimizer steps more than before."""
    folder, last = interrupted.folder, interrupted.step + 2
    again = run_here(command(folder, f"trainer.total_steps={last}", recorded(folder)))
    assert again.returncode == 0, again.stderr
    assert f"resumed at optimizer step {interrupted.step}" in again.stdout
    return Resumed(folder, interrupted.step, last)


def check_interrupted(run: Interrupted) -> None:
    assert run.children
    assert run.status == 130, run.output
    assert "interrupted" in run.output
    assert "Traceback" not in run.output
    assert "received at time" not in run.output  # a stack of Ray's C++ part
    assert f"saved at optimizer step {run.step}; the same command goes on" in run.output
    assert (run.folder / "checkpoints" / f"step_{run.step}").is_dir()
    _, alive = psutil.wait_procs(run.children, timeout=15)
    assert not alive, [p.cmdline()[:3] for p in alive]


def test_an_interrupted_run_saves_and_leaves_no_process(interrupted: Interrupted) -> None:
    check_interrupted(interrupted)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_run_saves_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    check_interrupted(interrupt(tmp_path, number))


def test_a_run_leaves_its_files_and_a_second_one_resumes_it(resumed: Resumed) -> None:
    folder, steps = resumed.folder, [*range(1, resumed.last + 1)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The line of a step is written anew when its evaluation has ended.
    assert [r["step"] for r in lines] == [0, *steps, resumed.last]
    assert [r["step"] for r in lines if "val/score" in r] == [0, resumed.last]
    records = records_of(folder)
    assert [r["step"] for r in records] == steps
    for record in records:
        for key in (
            "step",
            "time_s",
            "policy_version",
            "reward/mean",
            "staleness/mean",
            "loss",
            "tokens_per_s",
            "pool/ready",
            "off_policy_share",
            "num_turns/mean",
            "time/wait_s",
            "time/score_s",
            "time/train_s",
            "time/step_s",
            "wait/trainer_starved",
            "wait/generation_saturated",
        ):
            assert isinstance(record[key], int | float), key
    assert [r["policy_version"] for r in records] == sorted(r["policy_version"] for r in records)

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["optimizer_steps"] == resumed.last
    for key in ("eval_before", "eval_after", "tool_use_before", "tool_use_after"):
        assert 0 <= summary[key] <= 1
    assert 0 < summary["trainer_starved"] <= 1
    assert 0 <= summary["generation_saturated"] <= 1
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_trained_can_be_read(resumed: Resumed) -> None:
    text = (resumed.folder / "rollouts.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert {r["step"] for r in rows} == {*range(1, resumed.last + 1)}
    assert all(r["prompt"] and r["response"] and 0 <= r["reward"] <= 1 for r in rows)
    assert {r["version"] for r in rows} <= {*range(resumed.last + 1)}


def test_every_figure_of_a_run_is_in_the_page_and_the_other_way_round(resumed: Resumed) -> None:
    keys = {key for record in records_of(resumed.folder) for key in record}
    assert undocumented(keys) == set()
    assert unseen(documented(always=True), keys) == set()


def test_its_logs_are_in_its_folder(resumed: Resumed) -> None:
    logs = resumed.folder / "logs"
    parts = ("trainer", "pool", "gateway", "rollout", "supervisor", "engine")
    assert {path.name for path in logs.iterdir()} >= {f"{part}.log" for part in parts}
    log = (logs / "trainer.log").read_text()
    assert f"resumed at optimizer step {resumed.began}" in log
    assert f"step {resumed.last:4}  reward" in log


def test_what_each_step_was_trained_on_is_kept_for_people(resumed: Resumed) -> None:
    assert trained_steps(resumed.folder) == [*range(1, resumed.last + 1)]
    for step in (1, resumed.last):
        (first, *_) = read_trained(resumed.folder, step)
        assert [set(columns) for columns in first.columns] == [
            {"advantages", "weights", "prox_log_probs", "mask"} for _ in first.trajectory.steps
        ]
        calls = [each.metadata["timing"] for each in first.trajectory.steps]
        assert all(call["engine_s"] > 0 for call in calls)


def test_its_ledger_accounts_for_every_prompt(resumed: Resumed) -> None:
    found = audit(resumed.folder / "checkpoints" / LEDGER)
    assert found.trained == 2 * resumed.last
    assert found.updates == dict.fromkeys(range(1, resumed.last + 1), 2)
    assert found.doubled == ()
    assert len(found.draws) == found.trained + found.dropped.total() - found.returned + len(
        found.in_flight + found.waiting
    )


def test_a_recording_is_trained_again_without_engines_to_the_same_bits(resumed: Resumed) -> None:
    folder = resumed.folder
    done = run_here(
        command(
            folder,
            f"trainer.total_steps={resumed.last}",
            f"trainer.load_debug_rollout_data={folder / 'batches'}",
            "run.resume=never",  # a replay has nothing to start over: it leaves the run alone
        )
    )
    assert done.returncode == 0, done.stderr
    replayed, recorded = records_of(folder / "replay"), records_of(folder)
    assert [r["step"] for r in replayed] == [*range(1, resumed.last + 1)]
    for key in ("loss", "grad_norm", "staleness/mean", "off_policy_share", "policy_version"):
        assert [r[key] for r in replayed] == [r[key] for r in recorded], key
    assert "gateway" not in done.stdout

    missing = run_here(command(folder, f"trainer.load_debug_rollout_data={folder / 'nowhere'}"))
    assert missing.returncode == 2
    assert "no batch is recorded" in missing.stderr


def test_its_policy_is_exported_as_a_model_that_transformers_loads(
    resumed: Resumed, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    done = run_here(
        [sys.executable, "-m", "stepwell", "export", str(resumed.folder), "--to", str(target)],
    )
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    start = AutoModelForCausalLM.from_pretrained(
        ROOT / "examples" / "quickstart" / "model", local_files_only=True
    ).state_dict()
    assert any(not torch.equal(w, start[name]) for name, w in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(target, local_files_only=True).chat_template

    again = run_here(
        [sys.executable, "-m", "stepwell", "export", str(resumed.folder), "--to", str(target)]
    )
    assert again.returncode == 2
    assert "which exists; name a new folder" in again.stderr


def kill_when_there_is(path: Path, argv: list[str]) -> None:
    """Runs the command until this is there, kills it, and waits for its children to end."""
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    children: list[psutil.Process] = []
    try:
        while not path.exists():
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
        psutil.wait_procs(children, timeout=30)


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    argv = command(tmp_path, "trainer.total_steps=6", "trainer.checkpoint_every=2")
    kill_when_there_is(tmp_path / "checkpoints" / "step_2", argv)
    second = run_here(argv)
    assert second.returncode == 0, second.stderr
    assert "resumed at optimizer step" in second.stdout
    records = records_of(tmp_path)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    # A version belongs to one policy: none that the lost steps published is used again.
    versions = [r["policy_version"] for r in records]
    assert versions == sorted(versions)
    found = audit(tmp_path / "checkpoints" / LEDGER)
    assert found.trained == 12
    assert found.doubled == ()


@pytest.mark.long
def test_a_run_that_did_all_its_steps_does_more_when_it_is_asked(tmp_path: Path) -> None:
    for total in (1, 3):
        done = run_here(command(tmp_path, f"trainer.total_steps={total}"))
        assert done.returncode == 0, done.stderr
    assert "resumed at optimizer step 1" in done.stdout
    assert [r["step"] for r in records_of(tmp_path)] == [1, 2, 3]
    assert audit(tmp_path / "checkpoints" / LEDGER).doubled == ()


@pytest.mark.long
def test_a_version_that_is_rolled_back_beside_a_trainer_is_trained_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            tmp_path,
            "trainer.total_steps=1000",
            "trainer.keep_weights=3",
            "validation.before_train=false",
            "validation.every=0",
            "async_training.trigger_parameter_sync_step=1",
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None

    def read_until(said: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if said in line:
                return
        pytest.fail(f"it never said {said!r}")

    try:
        read_until("step    3")
        done = run([sys.executable, "-m", "stepwell", "rollback", str(tmp_path), "--to", "0"])
        assert done.returncode == 0, done.stderr
        assert "is served, with the weights of 0; the trainer goes on from them" in done.stdout
        refused = run([sys.executable, "-m", "stepwell", "rollback", str(tmp_path), "--to", "999"])
        assert refused.returncode == 2
        assert "version 999 is not kept; kept are 0, " in refused.stderr
        read_until("was served by a roll-back; training goes on from it, with the weights of 0")
        read_until("step ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert records_of(tmp_path)[-1]["publish/rolled_back"] == 1


@pytest.mark.long
def test_a_run_that_fails_says_why_in_one_line_and_where_its_logs_are_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "async def agent(task, base_url, api_key): raise OSError"
    (tmp_path / "agent_that_raises.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    done = run_here(command(tmp_path, "rollout.agent=agent_that_raises:agent"))
    assert done.returncode == 1
    line, last = done.stderr.strip().splitlines()
    assert "OSError" in line
    log = tmp_path / "logs" / "trainer.log"
    assert last == f"stepwell: see {log}, and the logs of the other parts beside it"
    assert "RolloutError" in log.read_text()


def test_a_wrong_key_costs_no_start(tmp_path: Path) -> None:
    done = run_here(command(tmp_path, "trainer.total_step=2"))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "trainer.total_step is not a known key; did you mean 'total_steps'?" in line
    assert not tmp_path.joinpath("metrics.jsonl").exists()


def test_an_agent_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    done = run_here(command(tmp_path, "rollout.agent=examples.nowhere:agent"))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "rollout.agent is 'examples.nowhere:agent'" in line
