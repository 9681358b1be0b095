"""A harness is run whole and ended whole: each of its losses has a reason, none is scored 0, and
nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.errors import HarnessError, InfrastructureError, RolloutError
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.rollout.harness import Harness, folder_of_worker, remove_abandoned
from stepwell.trainer.rollout.sandboxes import SandboxPlan, SandboxRequest
from stepwell.trainer.rollout.worker import RolloutWorker
from tests.trainer.test_rollout import RecordingGateway, gateway

__all__ = ["gateway"]

TASK = {"instance_id": "t/1", "question": "What is 2 + 3?", "answer": "5"}
URL = "http://127.0.0.1:9/u/p"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, in which rollouts have theirs."""
    folder = tmp_path / "s"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def shell(script: str, **keys: Any) -> dict[str, Any]:
    return {"command": ["sh", "-c", script], "timeout_s": 20, **keys}


def harness(tmp_path: Path, script: str, **keys: Any) -> Harness:
    config = HarnessConfig.model_validate(shell(script) | keys)
    return Harness(config, logs=tmp_path / "logs")


async def test_a_command_is_given_its_rollout_a_fresh_folder_and_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "s")
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "given.txt").write_text("here")
    script = """
        echo "$1" "$URL" "$HOME"; env; cat given.txt; echo more >> given.txt; cat "$HOME/a/b.cfg"
    """
    run = harness(
        tmp_path,
        script,
        command=["sh", "-c", script, "sh", "{task.prompt}; {{model}}"],
        env={"URL": "{base_url}/v1"},
        files={"a/b.cfg": '{"m": {"{model}": {"k": "{api_key}"}}}'},
        workdir=str(tmp_path / "template"),
    )
    for _ in range(2):
        assert await run(TASK, URL, "key") is None
    said = sorted((tmp_path / "logs").iterdir())
    assert len(said) == 2
    for log in said:
        text = log.read_text()
        assert f"What is 2 + 3?; {{model}} {URL}/v1" in text
        assert '{"m": {"policy": {"k": "key"}}}' in text
        assert "SECRET_OF_MINE" not in text
        assert text.count("here") == 1  # nobody else's folder
        assert "more" not in text
    assert (tmp_path / "template" / "given.txt").read_text() == "here"
    assert not [*folder_of_worker(tmp_path / "s").iterdir()]


async def test_the_newest_logs_are_kept_while_other_workers_remove_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "oldest.log").touch()
    os.utime(logs / "oldest.log", (1, 1))
    # Listed, and not there: as one that another worker removes meanwhile.
    (logs / "removed.log").symlink_to(tmp_path / "nowhere")
    assert await harness(tmp_path, "true", keep_logs=1)(TASK, URL, "key") is None
    assert [log.name[:3] for log in logs.iterdir() if log.exists()] == ["t-1"]
    assert not caplog.records


GRADED = {"command": ["sh", "-c", 'test "$(cat answer)" = {task.answer}']}


@pytest.mark.parametrize(
    ("script", "grade", "reward"),
    [
        ("echo 5 > answer", GRADED, 1.0),
        ("echo 6 > answer", GRADED, 0.0),
        ("exit 7", GRADED, 0.0),  # it gave up
        ("sleep 60", GRADED, 0.0),  # on_timeout: grade
        ("true", {"command": ["sh", "-c", "echo 0.25 > r"], "file": "r"}, 0.25),
        ("echo 9 > r", {"command": ["sh", "-c", "echo -1 > r; exit 3"], "file": "r"}, -1.0),
        ("echo 5 > answer", f"{__file__}:grade", 0.5),
        ("true", f"{__file__}:grade_by_numpy", 0.5),
        ("true", None, None),
    ],
)
async def test_a_reward_is_what_the_grader_says(
    tmp_path: Path, script: str, grade: Any, reward: float | None
) -> None:
    timeout_s = 1 if "sleep" in script else 20
    how = {"gave_up": [7], "on_timeout": "grade", "timeout_s": timeout_s, "grade": grade}
    assert await harness(tmp_path, script, **how)(TASK, URL, "key") == reward


def grade(folder: Path, transcript: list[dict[str, Any]], task: Mapping[str, Any]) -> float:
    return 0.5 if (folder / "answer").read_text().strip() == task["answer"] else 0.0


def grade_by_numpy(folder: Path, transcript: Any, task: Any) -> Any:
    return np.float32(0.25) * np.int64(2)


def grade_by_far(folder: Path, transcript: Any, task: Any) -> Any:
    return 10**5000


def grade_by_truth(folder: Path, transcript: Any, task: Any) -> Any:
    return True


def fails(folder: Path, transcript: list[dict[str, Any]], task: Mapping[str, Any]) -> float:
    raise KeyError("none")


def gives_up_waiting(folder: Path, transcript: Any, task: Any) -> float:
    raise TimeoutError("the judge is busy")


async def test_a_program_of_the_template_is_run_by_its_path_in_the_copy(tmp_path: Path) -> None:
    (tmp_path / "template" / "bin").mkdir(parents=True)
    program = tmp_path / "template" / "bin" / "agent"
    program.write_text("#!/bin/sh\necho 5 > answer\n")
    program.chmod(0o755)
    keys = {"workdir": str(tmp_path / "template"), "grade": GRADED}
    run = harness(tmp_path, "", command=["bin/agent"], **keys)
    assert await run(TASK, URL, "key") == 1.0
    with pytest.raises(RolloutError, match=r"'bin/other', which is not in .*workdir .*template"):
        harness(tmp_path, "", command=["bin/other"], **keys)
    with pytest.raises(RolloutError, match=r"workdir \(None\); install it, or give its whole path"):
        harness(tmp_path, "", command=["./agent"])


async def test_a_program_is_looked_for_where_the_section_says(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "of_mine").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin" / "of_mine").chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}"}
    assert await harness(tmp_path, "", command=["of_mine"], env=env)(TASK, URL, "k") is None


async def test_no_other_user_of_the_machine_looks_into_a_rollouts_folder(tmp_path: Path) -> None:
    run = harness(tmp_path, "ls -ld ../.. | grep -q ^drwx------")
    assert await run(TASK, URL, "k") is None


async def test_hidden_tests_come_over_what_the_agent_left(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test.sh").write_text("exit 1")
    grade = {"command": ["sh", "test.sh"], "files": str(tmp_path / "hidden")}
    assert await harness(tmp_path, "echo exit 0 > test.sh", grade=grade)(TASK, URL, "k") == 0.0


async def test_hidden_tests_are_no_files_of_the_agents(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    for i in range(99):
        (tmp_path / "hidden" / f"{i}.py").write_text("assert True")
    grade = {"command": ["sh", "-c", 'test "$(ls | wc -l)" = 99'], "files": tmp_path / "hidden"}
    run = harness(tmp_path, "true", limits={"files": 50}, grade=grade)
    assert await run(TASK, URL, "key") == 1.0


@pytest.mark.parametrize("way", ["file", "folder"])
async def test_a_link_that_the_agent_left_is_not_followed_out_of_the_folder(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "hidden" / "tests").mkdir(parents=True)
    (tmp_path / "hidden" / "tests" / "test.sh").write_text("echo 0.5 > tests/r")
    (tmp_path / "mine").mkdir()
    for name in ("test.sh", "r"):
        (tmp_path / "mine" / name).write_text("keep")
    mine = tmp_path / "mine"
    links = f"mkdir tests && ln -s {mine}/test.sh tests/test.sh && ln -s {mine}/r tests/r"
    script = links if way == "file" else f"ln -s {mine} tests"
    grade = {"command": ["sh", "tests/test.sh"], "files": str(tmp_path / "hidden")}
    run = harness(tmp_path, script, grade={**grade, "file": "tests/r"})
    assert await run(TASK, URL, "k") == 0.5
    assert [(mine / name).read_text() for name in ("test.sh", "r")] == ["keep", "keep"]
    left_nothing(tmp_path)


@pytest.mark.parametrize(
    ("script", "grading", "why"),
    [
        ("true", "mkfifo r", "r is no plain file"),
        ("true", "ln -s /etc/hostname r", "r is no plain file"),
        ("true", r"printf '\377' > r", "r holds no number"),
        ("true", "head -c 100000 /dev/zero > r", "more than 65536 bytes"),
        ("mkdir r", "true", "no r was written"),
        ("cd .. && rm -r work && ln -s /etc work", "echo 1 > r", "replaced .* its folder work"),
        ("cd .. && rm -r work", "echo 1 > r", "removed its folder work"),
    ],
)
async def test_what_an_agent_did_to_its_folder_is_its_own_loss(
    tmp_path: Path, script: str, grading: str, why: str
) -> None:
    grade = {"command": ["sh", "-c", grading], "file": "r"}
    with pytest.raises(HarnessError, match=why):
        await harness(tmp_path, script, grade=grade)(TASK, URL, "key")
    left_nothing(tmp_path)


async def test_a_folder_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    script = f'{sys.executable} -c "{deep}"'
    assert await harness(tmp_path, script, timeout_s=60)(TASK, URL, "key") is None
    left_nothing(tmp_path)


SMALL = {"processes": 12, "disk_mb": 2, "files": 200, "output_mb": 1, "memory_mb": 128}
LOSSES: Mapping[str, tuple[str, type[Exception], str]] = {
    "crash": ("echo oops >&2; exit 3", HarnessError, "exit status 3: oops"),
    "signal": ("kill -SEGV $$", HarnessError, "killed by SIGSEGV"),
    "hang": ("trap '' TERM; sleep 600", TimeoutError, "ran longer than 1 s"),
    "forks": (
        "for i in $(seq 30); do (setsid sleep 600 &) ; done; sleep 600",
        HarnessError,
        "limits: processes",
    ),
    "disk": ("head -c 40000000 /dev/zero > big; sleep 600", HarnessError, "limits: disk"),
    "files": ("for i in $(seq 400); do : > $i; done; sleep 600", HarnessError, "limits: files"),
    "output": ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", HarnessError, "output"),
    "memory": (
        f"{sys.executable} -c \"x = b'x' * (400 << 20); import time; time.sleep(600)\"",
        HarnessError,
        "limits: memory",
    ),
    "cpu": ("(while :; do :; done) & wait", HarnessError, "limits: cpu_s: 2 of 1 s"),
    "children": ("(setsid sleep 600 &); nohup sleep 601 & exit 4", HarnessError, "exit status 4"),
    "service": ("exit 75", InfrastructureError, "exit status 75"),
    "no_score": ("exit 0", HarnessError, "grading: r holds 'many', no number"),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_each_loss_has_its_reason_and_leaves_nothing(tmp_path: Path, loss: str) -> None:
    script, error, why = LOSSES[loss]
    run = harness(tmp_path, script, **losing(loss))
    with pytest.raises(error, match=why):
        await run(TASK, URL, "key")
    left_nothing(tmp_path)


def losing(loss: str) -> dict[str, Any]:
    return {
        # A machine with other work to do may take seconds to start a shell.
        "timeout_s": 1 if loss == "hang" else 60,
        "limits": SMALL | {"output": {"disk_mb": 512}, "cpu": {"cpu_s": 1}}.get(loss, {}),
        "infrastructure": [75],
        "grade": {"command": ["sh", "-c", "echo many > r"], "file": "r"},
    }


def left_nothing(tmp_path: Path) -> None:
    assert not [*folder_of_worker(tmp_path / "s").iterdir()]
    scratch = str(tmp_path / "s")
    for process in psutil.process_iter():
        try:
            assert not process.environ().get("HOME", "").startswith(scratch), process.cmdline()
        except psutil.Error:
            continue


@pytest.mark.parametrize(
    ("grade", "why"),
    [
        ({"command": ["sh", "-c", "kill -9 $$"]}, "grading: sh: killed by SIGKILL"),
        ({"command": ["sh", "-c", "nowhere"]}, "grading: sh: is not there"),
        ({"command": ["sh", "-c", "sleep 60"], "timeout_s": 1}, "grading: sh took more than 1 s"),
        ({"command": ["true"], "file": "r"}, "grading: no r was written"),
        ({"command": ["sh", "-c", "echo nan > r"], "file": "r"}, "write a finite number"),
        (f"{__file__}:fails", "grading: .*: KeyError: 'none'"),
        (f"{__file__}:gives_up_waiting", "grading: .*: TimeoutError: the judge is busy"),
        (f"{__file__}:grade_by_far", r"returned a number \(int\); return a number within ±1e\+09"),
        (f"{__file__}:grade_by_truth", r"returned True \(bool\); return a number"),
    ],
)
async def test_what_cannot_be_graded_has_no_score(tmp_path: Path, grade: Any, why: str) -> None:
    with pytest.raises(HarnessError, match=why):
        await harness(tmp_path, "true", grade=grade)(TASK, URL, "key")


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        (125, InfrastructureError, "cannot be run: no daemon"),
        (127, HarnessError, "exit status 127: no daemon"),  # as without a container: it ends a run
        (
            137,
            HarnessError,
            r"137: no daemon; a container over rollout.harness.limits.memory_mb \(",
        ),
    ],
)
async def test_a_containers_daemon_is_told_from_what_ran_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], why: str
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = run ] || exit 0\necho no daemon\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run = harness(tmp_path, "true", sandbox={"kind": "docker", "image": "x"})
    with pytest.raises(error, match=why):
        await run(TASK, URL, "key")
    left_nothing(tmp_path)


def grade_by_name(folder: Path, transcript: list[dict[str, Any]], task: Mapping[str, Any]) -> float:
    (name,) = os.listdir(folder)
    raise ValueError(f"what is {name}?")


async def test_a_name_that_is_no_text_is_a_failure_of_its_rollout_alone(tmp_path: Path) -> None:
    """An agent may call a file anything."""
    run = harness(tmp_path, "touch \"$(printf 'a\\377')\"", grade=f"{__file__}:grade_by_name")
    with pytest.raises(HarnessError, match="what is a"):
        await run(TASK, URL, "key")
    (log,) = (tmp_path / "logs").iterdir()
    assert "ValueError: what is a" in log.read_text()
    left_nothing(tmp_path)


async def test_an_image_that_cannot_be_had_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho manifest unknown\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run = harness(tmp_path, "true", sandbox={"kind": "docker", "image": "x"})
    with pytest.raises(InfrastructureError, match="docker: image x: exited 1: manifest unknown"):
        await run(TASK, URL, "key")
    left_nothing(tmp_path)


async def test_an_image_is_asked_for_again_after_no_process_could_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run = harness(tmp_path, "true", sandbox={"kind": "docker", "image": "x"})

    async def no_memory(*argv: str, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", no_memory)
        with pytest.raises(InfrastructureError, match="no process can be started"):
            await run(TASK, URL, "key")
    assert await run(TASK, URL, "key") is None
    left_nothing(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [("x" * 200_000, "is longer"), ("a\0b", "null byte"), ("\ud800", "surrogates not allowed")],
)
async def test_a_prompt_that_no_command_line_holds_is_the_rollouts_loss(
    tmp_path: Path, prompt: str, why: str
) -> None:
    """The machine is well, and would say the same each time."""
    run = harness(tmp_path, "", command=["true", "{task.prompt}"])
    with pytest.raises(HarnessError, match=rf"true: an argument .*{why}.*harness\.files"):
        await run({**TASK, "question": prompt}, URL, "key")
    left_nothing(tmp_path)


async def test_sockets_and_pipes_of_the_template_stay_there(tmp_path: Path) -> None:
    """A tool that runs in a repository has its own there."""
    template = tmp_path / "template"
    template.mkdir()
    (template / "given.txt").write_text("here")
    os.mkfifo(template / "pipe")
    os.mknod(template / "socket", stat.S_IFSOCK | 0o600)
    run = harness(tmp_path, 'test "$(ls)" = given.txt', workdir=str(template))
    assert await run(TASK, URL, "key") is None


async def test_a_rollout_that_is_cancelled_while_it_is_set_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(9):
        (tmp_path / "template" / f"{i}").mkdir(parents=True)
        (tmp_path / "template" / f"{i}" / "large").write_text("x")
    copying, goes_on, copy2 = threading.Event(), threading.Event(), shutil.copy2

    def slow(source: str, to: str) -> None:
        copying.set()
        goes_on.wait(60)
        copy2(source, to)

    monkeypatch.setattr(shutil, "copy2", slow)
    run = harness(tmp_path, "true", workdir=str(tmp_path / "template"))
    rollout = asyncio.ensure_future(run(TASK, URL, "key"))
    await asyncio.to_thread(copying.wait, 60)
    rollout.cancel()
    await asyncio.wait({rollout}, timeout=0.5)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    for thread in threading.enumerate():
        if thread.name == "Rollout.prepare":
            thread.join()
    left_nothing(tmp_path)


def told_hidden(request: SandboxRequest) -> SandboxPlan:
    return SandboxPlan(["echo", *request.command, *map(str, request.hidden)], request.env)


async def test_an_agent_is_to_see_neither_other_rollouts_nor_the_tests(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    grade = {"command": ["grading"], "files": str(tmp_path / "hidden")}
    run = harness(tmp_path, "", command=["agent"], sandbox=f"{__file__}:told_hidden", grade=grade)
    assert await run(TASK, URL, "key") == 1.0
    (log,) = (tmp_path / "logs").iterdir()
    others = folder_of_worker(tmp_path / "s")
    assert log.read_text() == f"agent {others} {tmp_path / 'hidden'}\ngrading {others}\n"
    # The run's folder has the gateway's key. A worker of another machine has no such folder.
    for name, told in {"run": f" {tmp_path / 'run'}", "elsewhere": ""}.items():
        (tmp_path / "run").mkdir(exist_ok=True)
        logs = tmp_path / f"logs of {name}"
        run = Harness(run.config, logs=logs, run_dir=tmp_path / name)
        assert await run(TASK, URL, "key") == 1.0
        (log,) = logs.iterdir()
        assert f"grading {others}{told}\n" in log.read_text()


async def test_a_container_of_another_network_finds_the_gateway_wherever_its_address_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        """#!/bin/sh
        [ "$1" = run ] || exit 0
        for each in "$@"; do
            if [ -f "${each%%:*}/home/a.cfg" ]; then cat "${each%%:*}/home/a.cfg"; fi
        done
        echo "$@"
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run = harness(
        tmp_path,
        "",
        command=["agent", "--url={base_url}/v1", "{task.prompt}"],
        files={"a.cfg": 'url = "{base_url}/v1"\n'},
        sandbox={"kind": "docker", "image": "x", "network": "agents"},
    )
    asked = {**TASK, "question": "http://[1: what is wrong with http://127.0.0.1:9?"}
    assert await run(asked, URL, "key") is None
    (log,) = (tmp_path / "logs").iterdir()
    called = URL.replace("127.0.0.1", "host.docker.internal")
    file, line = log.read_text().splitlines()
    assert file == f'url = "{called}/v1"'
    assert line.endswith(f"x agent --url={called}/v1 {asked['question']}")


async def test_a_cancelled_rollout_leaves_nothing(tmp_path: Path) -> None:
    run = harness(tmp_path, "setsid sleep 600 & touch $HOME/begun; sleep 600", timeout_s=600)
    rollout = asyncio.ensure_future(run(TASK, URL, "key"))
    while not [*(tmp_path / "s").glob("*/*/home/begun")]:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    left_nothing(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, pytest.param(10, marks=pytest.mark.long)])
async def test_many_rollouts_of_bad_harnesses_are_lost_each_with_its_reason(
    tmp_path: Path, gateway: RecordingGateway, n: int
) -> None:
    # Ten of `cpu` would take twenty seconds of it.
    kinds = [name for name in LOSSES if name not in ("cpu", "service", "no_score")]
    cases = "\n".join(f"{name}) {LOSSES[name][0]} ;;" for name in kinds)
    command = ["sh", "-c", f'case "$1" in\n{cases}\nesac', "sh", "{task.prompt}"]
    ends: Counter[str] = Counter()

    async def run(timeout_s: float, kinds: Sequence[str]) -> None:
        harness = {"command": command, "timeout_s": timeout_s, "limits": SMALL}
        harness |= {"grade": {"command": ["true"]}}
        config = RolloutConfig.model_validate({"harness": harness, "max_attempts": 1, "n": n})
        worker = RolloutWorker(config, [gateway.url], logs=tmp_path / "logs")
        groups = (
            worker.run_group({"instance_id": kind, "question": kind}, f"{kind}-{i}", n)
            for i, kind in enumerate(kinds)
        )
        for done in await asyncio.gather(*groups):
            ends.update(done)
        await worker.close()

    others = [kind for kind in kinds if kind != "hang"]
    await asyncio.gather(run(1, ["hang"]), run(120, [*others, "disk"]))
    assert ends.total() == 10 * n
    assert not gateway.told("complete")  # nothing is scored, so nothing is scored 0
    assert ends["timeout"] == n
    assert len(gateway.told("abort")) == 10 * n
    reasons = [body["reason"] for body in gateway.told("abort")]
    assert all(r == "timeout" or r.startswith("HarnessError: ") for r in reasons), reasons
    for kind in kinds:
        why = LOSSES[kind][2] if kind != "hang" else "timeout"
        assert sum(why in r for r in reasons) >= n, (kind, reasons)
    assert len([*(tmp_path / "logs").iterdir()]) == 10 * n
    left_nothing(tmp_path)


async def test_an_attempt_that_the_machine_failed_is_made_again_and_not_counted(
    tmp_path: Path, gateway: RecordingGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.trainer.rollout.worker.OUTAGE_PAUSE_S", (0.0, 0.0))
    counter = tmp_path / "attempts"
    script = f"echo x >> {counter}; test $(wc -l < {counter}) -ge 3 || exit 75"
    config = RolloutConfig.model_validate(
        {
            "harness": shell(script, infrastructure=[75], grade={"command": ["true"]}),
            "max_attempts": 1,
        }
    )
    worker = RolloutWorker(config, [gateway.url])
    worker.ready = ready  # type: ignore[method-assign]
    assert await worker.run_group(TASK, "g", 1) == {"complete": 1}
    await worker.close()
    assert [body["reward"] for body in gateway.told("complete")] == [1.0]
    aborted = gateway.told("abort")
    assert len(aborted) == 2
    assert all(b["reason"].startswith("infrastructure: InfrastructureError") for b in aborted)
    assert all(b["will_retry"] for b in aborted)


async def test_set_up_run_and_grading_of_different_rollouts_overlap(
    tmp_path: Path, scratch: Path, gateway: RecordingGateway
) -> None:
    """With one slot: an agent runs until the next one's folder is there, and its grading until the
    next agent runs; neither would come to an end otherwise."""
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "given").touch()
    (tmp_path / "begun").mkdir()
    next_is_set_up = (
        f"until [ $(ls -d {scratch}/*/*/work/given | wc -l) -ge 2 ]; do sleep 0.05; done"
    )
    script = f"""
        n=$(ls {tmp_path}/begun | wc -l); touch {tmp_path}/begun/$n; echo $n > n
        [ $n = 2 ] || {{ {next_is_set_up} ; }}
    """
    next_runs = (
        f"[ $(cat n) = 2 ] || until [ -e {tmp_path}/begun/$(($(cat n) + 1)) ]; do sleep 0.05; done"
    )
    section = shell(script, timeout_s=60, workdir=str(tmp_path / "template"))
    section |= {"grade": {"command": ["sh", "-c", next_runs]}}
    given = {"harness": section, "concurrency": 1, "max_attempts": 1}
    worker = RolloutWorker(RolloutConfig.model_validate(given), [gateway.url])
    assert await worker.run_group(TASK, "g", 3) == {"complete": 3}
    await worker.close()
    assert len([*(tmp_path / "begun").iterdir()]) == 3  # one agent at a time, each with a number
    left_nothing(tmp_path)


async def test_at_most_twice_as_many_rollouts_as_run_at_once_have_a_folder(
    tmp_path: Path, gateway: RecordingGateway
) -> None:
    seen = tmp_path / "seen"
    script = f"ls -d {tmp_path}/s/*/*/work | wc -l >> {seen}"
    section = shell(script, timeout_s=60)
    section |= {"grade": {"command": ["sh", "-c", script]}}
    given = {"harness": section, "concurrency": 2, "max_attempts": 1}
    worker = RolloutWorker(RolloutConfig.model_validate(given), [gateway.url])
    assert await worker.run_group(TASK, "g", 12) == {"complete": 12}
    await worker.close()
    assert max(map(int, seen.read_text().split())) <= 4


async def test_a_set_up_that_fails_is_its_rollouts_own_loss(
    tmp_path: Path, gateway: RecordingGateway
) -> None:
    section = shell("true", workdir=f"{tmp_path}/{{task.metadata.repo}}")
    section |= {"grade": {"command": ["true"]}}
    given = {"harness": section, "max_attempts": 1}
    worker = RolloutWorker(
        RolloutConfig.model_validate(given), [gateway.url], logs=tmp_path / "logs"
    )
    task = {**TASK, "metadata": {"repo": "none"}}
    ((reason, n),) = (await worker.run_group(task, "g", 2)).items()
    await worker.close()
    assert n == 2
    assert reason.startswith("HarnessError: workdir: there is no folder")
    assert [body["reason"] for body in gateway.told("abort")] == [reason] * 2
    assert all("there is no folder" in log.read_text() for log in (tmp_path / "logs").iterdir())
    left_nothing(tmp_path)


async def ready(patience_s: float = 0.0) -> None:
    return


def test_folders_of_a_worker_that_was_killed_are_removed(tmp_path: Path) -> None:
    mine = folder_of_worker(tmp_path)
    prefix = mine.name.removesuffix(str(os.getpid()))
    dead, elsewhere = tmp_path / f"{prefix}4194305", tmp_path / f"{prefix}2-4194305"
    for folder in (dead, mine, elsewhere):
        (folder / "x" / "work").mkdir(parents=True)
    remove_abandoned(tmp_path)
    assert not dead.exists()
    assert mine.exists()
    assert elsewhere.exists()  # of another machine, in a folder that both have


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"metadata": {"repo": "../../etc"}}, "'../../etc', which is no folder's name"),
        ({"metadata": {"repo": ".."}}, "which is no folder's name"),
        ({"metadata": {"repo": "none"}}, "there is no folder"),
        ({}, "the task has no 'metadata'"),
    ],
)
async def test_a_task_names_no_path(tmp_path: Path, task: dict[str, Any], why: str) -> None:
    run = harness(tmp_path, "true", workdir=f"{tmp_path}/{{task.metadata.repo}}")
    with pytest.raises(HarnessError, match=why):
        await run(task, URL, "key")


BAD: Mapping[str, tuple[dict[str, Any] | str, str]] = {
    "preset": ("claude", "preset is 'claude', which is none of claude_code, codex"),
    "presets": ({"preset": ["codex"]}, r"harness\.preset\n.*valid string"),
    "env": ({"preset": "codex", "env": ["A=1"]}, r"harness\.env\n.*valid dictionary"),
    "files": ({"preset": "codex", "files": "x"}, r"harness\.files\n.*valid dictionary"),
    "empty": ({"env": {}}, "command is empty; give one, or a preset"),
    "placeholder": ({"command": ["a", "{base}"]}, r"\{base\}, which is none of \{api_key\}"),
    "grading": (
        {"command": ["a"], "grade": {"command": ["sh", "-c", "echo ${reward} > r"]}},
        r"has \{reward\}, which is none of .*; write \{\{reward\}\} for the text \{reward\}",
    ),
    "workdir": ({"command": ["a"], "workdir": "x/{model}"}, "use placeholders of the task"),
    "home": ({"command": ["a"], "files": {"/etc/x": ""}}, "name files by their path in the home"),
    "codes": ({"command": ["a"], "gave_up": [3], "infrastructure": [3]}, "both hold 3"),
    "success": ({"command": ["a"], "gave_up": [0]}, "holds 0, which is success"),
    "no_image": ({"command": ["a"], "sandbox": {"image": "x"}}, "image is 'x'.* which has none"),
    "no_network": (
        {"command": ["a"], "sandbox": {"kind": "bubblewrap", "network": "none"}},
        "network is 'none', but kind is 'bubblewrap', which has none of its own",
    ),
    "no_cpus": ({"command": ["a"], "sandbox": {"cpus": 2}}, "cpus is 2.0, but kind is 'process'"),
    "grade": ({"command": ["a"], "grade": {}}, "give one of them"),
    "file": ({"command": ["a"], "grade": {"command": ["b"], "file": "/r"}}, "inside the work"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_mistake_in_the_section_names_key_value_and_remedy(bad: str) -> None:
    given, why = BAD[bad]
    with pytest.raises(ValidationError, match=why):
        RolloutConfig.model_validate({"harness": given})


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"command": ["nowhere-at-all"]}, "'nowhere-at-all', which is not on the PATH; install"),
        ({"workdir": "no/folder"}, "workdir is 'no/folder', which is no folder in"),
        ({"grade": {"command": ["b"], "files": "no"}}, "grade.files is 'no', which is no folder"),
        ({"grade": "nowhere:f"}, "grade.function is 'nowhere:f', which cannot be imported"),
        ({"grade": f"{__file__}:shell"}, r"write it as grade\(folder, transcript, task\)"),
        ({"sandbox": "podmann"}, "none of process, bubblewrap, docker, podman"),
    ],
)
def test_what_is_not_here_is_refused_before_anything_is_started(
    keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(RolloutError, match=why):
        load_agent("harness", None, HarnessConfig.model_validate(shell("true") | keys))


def test_arguments_that_no_agent_is_given_are_refused() -> None:
    config = HarnessConfig.model_validate(shell("true"))
    for agent, harness in (("harness", config), ("examples/tools/tools.yaml", None)):
        with pytest.raises(RolloutError, match=r"rollout\.agent_args is \{'turns': 3\}: only func"):
            load_agent(agent, {"turns": 3}, harness)


def test_a_preset_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, preset in PRESETS.items():
        with pytest.raises(RolloutError, match=preset.install.partition(" ")[0]) as raised:
            load_agent("harness", None, HarnessConfig(preset=name))
        assert preset.needs in str(raised.value)


def test_times_follow_from_the_harness_and_one_that_cannot_end_is_refused() -> None:
    harness = shell("true", timeout_s=100, grade={"command": ["true"], "timeout_s": 40})
    config = RolloutConfig.model_validate({"harness": harness})
    assert config.agent == "harness"
    assert (config.timeout_s, config.group_deadline_s, config.concurrency) == (200, 600, 16)
    with pytest.raises(ValidationError, match=r"timeout_s is 120, but harness\.timeout_s"):
        RolloutConfig.model_validate({"harness": harness, "timeout_s": 120})
    with pytest.raises(ValidationError, match="agent is 'a:b', but harness is given, too"):
        RolloutConfig.model_validate({"harness": harness, "agent": "a:b"})
    with pytest.raises(ValidationError, match="agent is 'harness', but harness is missing"):
        RolloutConfig(agent="harness")
