"""Harbor task folders are tasks: laid out as their images have it, scored by their own tests, and
refused by name where something of them is not read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.trainer.config import HarborSource, RolloutConfig
from stepwell.trainer.config.harness import HarnessConfig, HarnessLimits, SandboxChoice
from stepwell.trainer.data import PromptSource
from stepwell.trainer.data.harbor import HarborTasks
from stepwell.trainer.data.tasks import open_tasks
from stepwell.trainer.errors import ConfigError, DataError, HarnessError
from stepwell.trainer.rollout.harbor import HarborLayout
from stepwell.trainer.rollout.harness import Harness
from stepwell.trainer.rollout.sandboxes import SANDBOXES, SandboxRequest
from stepwell.trainer.rollout.worker import RolloutWorker
from tests.trainer.test_harness import scratch
from tests.trainer.test_rollout import RecordingGateway, gateway

__all__ = ["gateway", "scratch"]

TASKS = Path(__file__).parent / "harbor_tasks"
URL = "http://127.0.0.1:9/u/p"
SOLVE = """\

    case "$1" in
        *greeting*) cat data/name.txt && case "$1" in *"$PWD/greeting.txt"*) echo hello ;; esac \\
            > greeting.txt ;;
        *) wc -l < lines.txt | tr -d ' ' > count.txt ;;
    esac
"""


def tasks(path: Path = TASKS) -> list[dict[str, Any]]:
    return [*open_tasks(HarborSource(kind="harbor", path=path))]


def harness(tmp_path: Path, script: str) -> Harness:
    return Harness(
        HarnessConfig.model_validate({"command": ["sh", "-c", script, "sh", "{task.prompt}"]}),
        logs=tmp_path / "logs",
    )


def test_a_folder_of_tasks_and_a_task_alone_are_data() -> None:
    count, greet = tasks()
    assert (count["instance_id"], greet["instance_id"]) == ("count", "stepwell/greet")
    assert greet["question"].startswith("Write the text hello into /app/greeting.txt.")
    assert greet["metadata"] == {"difficulty": "easy", "harbor_task": "greet"}
    assert greet["harbor"]["verifier_env"] == {"GREETING": "hello"}
    assert tasks(TASKS / "greet") == [greet]


def test_tasks_of_one_instruction_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copytree(TASKS / "greet", tmp_path / name)
    config = HarborSource(kind="harbor", path=tmp_path)
    held_out = PromptSource(config).hold_out()
    rest = PromptSource(
        config, exclude=PromptSource(HarborSource(kind="harbor", path=tmp_path / "first")).prompts()
    )
    assert len(held_out) == 1
    assert [task["metadata"]["harbor_task"] for task in rest] == ["second"]


def test_tasks_of_one_name_are_told_apart_by_their_place(tmp_path: Path) -> None:
    """Each can be skipped, and is lost to infrastructure, for itself."""
    for folder in ("first", "second"):
        shutil.copytree(TASKS / "greet", tmp_path / folder)
    shutil.copytree(TASKS / "count", tmp_path / "stepwell")
    ids = ["stepwell/greet-0", "stepwell/greet-1", "stepwell"]
    assert [task["instance_id"] for task in tasks(tmp_path)] == ids
    config = HarborSource(kind="harbor", path=tmp_path, skip_instance_ids=(ids[0],))
    assert [task["instance_id"] for task in PromptSource(config)] == ids[1:]


@pytest.mark.parametrize(
    ("script", "rewards"), [(SOLVE, [0.75, 1.0]), ("true", [0.0, 0.0]), ("exit 1", None)]
)
async def test_a_tasks_own_tests_score_it(
    tmp_path: Path, script: str, rewards: list[float] | None
) -> None:
    run = harness(tmp_path, script)
    for i, task in enumerate(tasks()):
        if rewards is None:
            with pytest.raises(HarnessError, match="exit status 1"):
                await run(task, URL, "key")
        else:
            assert await run(task, URL, "key") == rewards[i]


async def test_a_reward_that_the_agent_wrote_is_none_and_none_at_all_is_a_loss(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cheat"
    shutil.copytree(TASKS / "greet", folder)
    (folder / "tests" / "test.sh").write_text("echo nothing to say\n")
    (task,) = tasks(folder)
    cheat = "mkdir -p ../logs/verifier && echo 1 > ../logs/verifier/reward.txt"
    with pytest.raises(HarnessError, match=r"grading: verifier wrote no reward.*nothing to say"):
        await harness(tmp_path, cheat)(task, URL, "key")


@pytest.mark.parametrize("script", ["rm -r ../logs/verifier", "mkdir ../tests; ln -s / ../tests/x"])
async def test_folders_that_the_agent_spoilt_are_made_anew(tmp_path: Path, script: str) -> None:
    _, task = tasks()
    assert await harness(tmp_path, script)(task, URL, "key") == 0.0
    link = f"cd .. && mv logs was && ln -s {tmp_path} logs"
    with pytest.raises(HarnessError, match="replaced or removed its folder logs"):
        await harness(tmp_path, link)(task, URL, "key")


async def test_rollouts_of_a_task_complete_with_its_reward(
    tmp_path: Path, gateway: RecordingGateway
) -> None:
    section = {"command": ["sh", "-c", SOLVE, "sh", "{task.prompt}"]}
    worker = RolloutWorker(RolloutConfig.model_validate({"harness": section}), [gateway.url])
    for task in tasks():
        assert await worker.run_group(task, "g", 2) == {"complete": 2}
    await worker.close()
    assert [body["reward"] for body in gateway.told("complete")] == [0.75, 0.75, 1.0, 1.0]


async def test_a_tasks_tests_have_the_time_that_it_gives_them(
    tmp_path: Path, gateway: RecordingGateway
) -> None:
    """However little of the rollout's own is left."""
    task = followed(tmp_path, "FROM x\n")
    (tmp_path / "t" / "tests" / "check.sh").write_text("sleep 6\n")
    given = {"harness": {"command": ["true"], "timeout_s": 5}, "timeout_s": 5, "max_attempts": 1}
    worker = RolloutWorker(RolloutConfig.model_validate(given), [gateway.url])
    assert await worker.run_group(task, "g", 1) == {"complete": 1}
    await worker.close()


async def test_an_agent_is_not_to_see_its_tasks_folder(tmp_path: Path) -> None:
    """It has the tests and, often, the solution."""
    _, task = tasks()
    section = {"command": ["agent"], "sandbox": f"{TASKS.parent / 'test_harness.py'}:told_hidden"}
    run = Harness(HarnessConfig.model_validate(section), logs=tmp_path / "logs")
    with pytest.raises(HarnessError, match="wrote no reward"):
        await run(task, URL, "key")
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().splitlines()[0].endswith(f" {TASKS / 'greet'}")


REFUSED: Mapping[str, tuple[str, str]] = {
    "steps": ('[[steps]]\nname = "a"', "has steps, which Stepwell does not read"),
    "mcp": ('[[environment.mcp_servers]]\nname = "x"', r"has environment\.mcp_servers, which"),
    "verifier": (
        '[verifier]\nenvironment_mode = "separate"',
        r"verifier\.environment_mode is 'separate', which Stepwell does not do",
    ),
    "network": ("[environment]\nallow_internet = false", "allow_internet is False"),
    "gpu": ("[environment]\ngpus = 1", r"environment\.gpus is 1"),
    "user": ('[agent]\nuser = "agent"', r"has agent\.user"),
    "health": ('[environment.healthcheck]\ncommand = "x"', r"has environment\.healthcheck"),
    "schema": ('schema_version = "2.0"', "schema_version is '2.0'; 1.0, 1.1, 1.2, 1.3, 1.4"),
    "secret": ('[verifier.env]\nKEY = "${KEY}"', "of this machine's environment; write the value"),
    "toml": ("[", "a Harbor task has task.toml and instruction.md"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_of_a_task_is_refused_by_name(tmp_path: Path, what: str) -> None:
    shutil.copytree(TASKS / "greet", tmp_path / "t")
    text, why = REFUSED[what]
    (tmp_path / "t" / "task.toml").write_text(text)
    with pytest.raises(DataError, match=why):
        tasks(tmp_path)


def test_a_task_without_tests_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greet", tmp_path / "t")
    (tmp_path / "t" / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match=r"t has no tests/test\.sh, which scores it; write one"):
        tasks(tmp_path)


def test_an_image_that_only_a_container_builds_is_refused_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greet", tmp_path / "t")
    with (tmp_path / "t" / "environment" / "Dockerfile").open("a") as out:
        out.write("RUN apt-get update && \\\n  apt-get install -y curl\n")
    (task,) = HarborTasks(HarborSource(kind="harbor", path=tmp_path))
    with pytest.raises(DataError, match=r"has RUN apt-get update .*only a container does"):
        HarborLayout(task["harbor"], tmp_path / "r", tmp_path / "r" / "work", "process")
    HarborLayout(task["harbor"], tmp_path / "r", tmp_path / "r" / "work", "docker")
    with pytest.raises(DataError, match=r"where no folder has a task\.toml"):
        tasks(tmp_path / "t" / "tests")


@pytest.mark.parametrize("source", ["../../secret", "link", "none.txt", '["name.txt",'])
def test_a_task_copies_nothing_of_this_machine(tmp_path: Path, source: str) -> None:
    shutil.copytree(TASKS / "greet", tmp_path / "t" / "greet")
    (tmp_path / "secret").write_text("key")
    environment = tmp_path / "t" / "greet" / "environment"
    (environment / "link").symlink_to(tmp_path / "secret")
    (environment / "Dockerfile").write_text(f"FROM x\nCOPY {source} ./\n")
    (task,) = tasks(tmp_path / "t")
    root = tmp_path / "r"
    with pytest.raises(DataError, match="which is no file or folder below"):
        HarborLayout(task["harbor"], root, root / "work", "bubblewrap")


DOCKERFILE = """\
FROM ubuntu:24.04
ENV GREETING="good day" TWICE=2
ENV NAME Ada L.
WORKDIR /opt
COPY name.txt old/
WORKDIR task
COPY name.txt .
"""


def followed(tmp_path: Path, dockerfile: str) -> dict[str, Any]:
    shutil.copytree(TASKS / "greet", tmp_path / "t")
    (tmp_path / "t" / "environment" / "Dockerfile").write_text(dockerfile)
    (task,) = tasks(tmp_path)
    return task


async def test_variables_and_folders_of_a_dockerfile_hold_without_a_container(
    tmp_path: Path,
) -> None:
    task = followed(tmp_path, DOCKERFILE.replace("COPY name.txt old/\n", ""))
    assert task["harbor"]["workdir"] == "/opt/task"
    (tmp_path / "t" / "tests" / "check.sh").write_text(
        'test "$(cat /opt/task/said)" = "good day 2 Ada L.: Ada" && test "$GREETING" = hello'
    )
    script = 'echo "$GREETING $TWICE $NAME: $(cat name.txt)" > said'
    assert await harness(tmp_path, script)(task, URL, "key") == 1.0


async def test_a_file_beside_the_last_working_folder_is_refused_without_a_container(
    tmp_path: Path,
) -> None:
    task = followed(tmp_path, DOCKERFILE)
    with pytest.raises(HarnessError, match=r"copies to old/, outside /opt/task"):
        await harness(tmp_path, "true")(task, URL, "key")


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        ("COPY name.txt ../../../name.txt", r"copies to \.\./.*, outside /app"),
        ("COPY . .\nCOPY name.txt out/", "copies to out/, which leads out of /app by a link"),
        ("COPY . .\nCOPY other .", None),  # its folder of that name takes the place of the link
    ],
)
async def test_a_dockerfile_writes_nothing_on_this_machine(
    tmp_path: Path, copies: str, why: str | None
) -> None:
    task = followed(tmp_path, f"FROM x\n{copies}\n")
    environment, mine = tmp_path / "t" / "environment", tmp_path / "mine"
    mine.mkdir()
    (environment / "out").symlink_to(mine)
    (environment / "other" / "out").mkdir(parents=True)
    (environment / "other" / "out" / "name.txt").write_text("Bob")
    run = harness(tmp_path, 'test "$(cat out/name.txt)" = Bob')
    if why is None:
        assert await run(task, URL, "key") == 0.0
    else:
        with pytest.raises(HarnessError, match=why):
            await run(task, URL, "key")
    assert not [*mine.iterdir()]
    assert not [*(tmp_path / "s").rglob("name.txt")]


async def test_files_of_the_tests_are_as_they_were_but_for_the_names_of_folders(
    tmp_path: Path,
) -> None:
    """A process has the names written out; ends of lines are not its business."""
    task = followed(tmp_path, "FROM x\n")
    (tmp_path / "t" / "tests" / "expected.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "t" / "tests" / "check.sh").write_text("cmp /app/said /tests/expected.txt\n")
    assert await harness(tmp_path, r"printf 'one\r\ntwo\r\n' > said")(task, URL, "key") == 1.0


async def test_a_process_is_told_its_own_folder_wherever_a_sentence_names_it(
    tmp_path: Path,
) -> None:
    task = followed(tmp_path, "FROM x\n")
    task["question"] = "Work in /app. Not /app.py, /app-2 or x/app; /app, (/app) and /app"
    told = harness(tmp_path, 'printf %s "$1" | sed "s|$PWD|HERE|g"; echo')
    assert await told(task, URL, "key") == 0.0
    (log,) = (tmp_path / "logs").iterdir()
    said = "Work in HERE. Not /app.py, /app-2 or x/app; HERE, (HERE) and HERE"
    assert log.read_text().splitlines()[0] == said


@pytest.mark.parametrize("written", ["[0.5]", "7", "{}", f'{{"reward": {10**400}}}', "[" * 5_000])
async def test_a_reward_file_of_another_form_is_a_loss_that_says_so(
    tmp_path: Path, written: str
) -> None:
    task = followed(tmp_path, "FROM x\n")
    (tmp_path / "t" / "tests" / "test.sh").write_text(
        f"echo '{written}' > /logs/verifier/reward.json\n"
    )
    with pytest.raises(HarnessError, match=r"^grading: verifier wrote no reward: "):
        await harness(tmp_path, "true")(task, URL, "key")


@pytest.mark.parametrize("line", ["ENV PATH=/opt/bin:$PATH", "COPY $NAME ./"])
def test_a_variable_in_a_dockerfile_is_a_containers(tmp_path: Path, line: str) -> None:
    task = followed(tmp_path, f"FROM x\n{line}\n")
    HarborLayout(task["harbor"], tmp_path / "r", tmp_path / "r" / "work", "docker")
    with pytest.raises(DataError, match="which only a container does"):
        HarborLayout(task["harbor"], tmp_path / "r", tmp_path / "r" / "work", "process")


def test_a_working_folder_that_a_variable_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"WORKDIR \$AT; name it in environment\.workdir"):
        followed(tmp_path, "FROM x\nARG AT=/x\nWORKDIR $AT\n")


@pytest.mark.parametrize("at", ["/", "/tests", "/app/.."])
def test_a_working_folder_that_no_rollout_can_have_is_refused(tmp_path: Path, at: str) -> None:
    with pytest.raises(DataError, match=r"the working folder is /.*; name another one"):
        followed(tmp_path, f"FROM x\nWORKDIR {at}\n")


def test_a_working_folder_is_named_as_an_image_has_it(tmp_path: Path) -> None:
    task = followed(tmp_path, "FROM x\nWORKDIR /srv/a/\nWORKDIR ../b\n")
    assert task["harbor"]["workdir"] == "/srv/b"


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_only_harbor_tasks_bring_the_image_of_a_container(kind: str) -> None:
    """A container of other tasks has to be named."""
    own = ["model.path=examples/quickstart/model", "rollout.harness.command=[a]"]
    container = f"rollout.harness.sandbox={kind}"
    harbor = {"kind": "harbor", "path": str(TASKS)}
    rows = {"kind": "jsonl", "path": "tasks.jsonl"}

    def loaded(**sources: Any) -> RunConfig:
        return load_config(None, [*own, container, f"data={json.dumps(sources)}"])

    assert loaded(train=harbor).rollout.harness is not None
    assert loaded(train=harbor, val=harbor).rollout.harness is not None
    for sources in ({"train": rows}, {"train": harbor, "val": rows}):
        with pytest.raises(ConfigError, match=f"kind is '{kind}', but image is missing; name one"):
            loaded(**sources)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ("{command: [a], grade: {command: [pytest]}}", "grade"),
        ("{command: [a], sandbox: {kind: docker, image: mine}}", "sandbox.image"),
    ],
)
def test_what_harbor_tasks_bring_themselves_is_refused_beside_them(keys: str, name: str) -> None:
    harbor = f"{{kind: harbor, path: {TASKS}}}"
    given = ["model.path=examples/quickstart/model", f"rollout.harness={keys}"]
    with pytest.raises(ConfigError, match=rf"rollout.harness.{name} is given, but Harbor tasks"):
        load_config(None, [*given, f"data={{train: {harbor}}}"])
    rows = "{kind: jsonl, path: tasks.jsonl}"
    assert load_config(None, [*given, f"data={{train: {harbor}, val: {rows}}}"])


def test_a_container_gets_no_key_by_its_command_line_and_its_program_its_users_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_RUNTIME_DIR", "SECRET_OF_MINE"):
        monkeypatch.setenv(name, f"/my/{name}")
    request = SandboxRequest(
        name="n",
        command=["agent"],
        root=Path("/s/r"),
        workdir=Path("/s/r/work"),
        env={"HOME": "/s/r/home", "API_KEY": "key-of-it"},
        choice=SandboxChoice(kind="podman", image="x"),
        limits=HarnessLimits(),
    )
    plan = SANDBOXES["podman"](request)
    argv = " ".join(plan.argv)
    assert "--env API_KEY --env HOME=/s/r/home x agent" in argv
    assert "key-of-it" not in argv
    assert "XDG" not in argv
    assert plan.env["HOME"] == "/my/HOME"  # where podman has its images
    assert plan.env["XDG_RUNTIME_DIR"] == "/my/XDG_RUNTIME_DIR"
    assert plan.env["API_KEY"] == "key-of-it"
    assert "SECRET_OF_MINE" not in plan.env


async def test_what_an_image_has_in_its_working_folder_is_not_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        """#!/bin/sh
        [ "$1" = run ] || exit 0
        for each in "$@"; do
            case "$each" in
                */work:/stepwell) for i in $(seq 300); do : > "${each%:/stepwell}/$i"; done ;;
                */logs:/logs) echo 1 > "${each%:/logs}/verifier/reward.txt" ;;
            esac
        done
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    section = {"command": ["agent"], "sandbox": "docker", "limits": {"files": 100}}
    run = Harness(HarnessConfig.model_validate(section))
    assert await run(tasks()[1], URL, "key") == 1.0


def test_tasks_of_one_name_in_two_folders_have_an_image_each(tmp_path: Path) -> None:
    tags = []
    for task_set in ("a", "b"):
        shutil.copytree(TASKS / "greet", tmp_path / task_set / "greet")
        (task,) = tasks(tmp_path / task_set)
        tags.append(HarborLayout(task["harbor"], tmp_path, tmp_path / "work", "docker").tag)
    assert all(tag.startswith("stepwell-harbor/greet:") for tag in tags)
    assert tags[0] != tags[1]


@pytest.mark.parametrize(("uid", "keeps"), [(0, False), (1000, True)])
def test_podman_keeps_the_ids_of_a_user_that_is_not_root(
    monkeypatch: pytest.MonkeyPatch, uid: int, keeps: bool
) -> None:
    """Root's podman refuses `--userns keep-id`, with which alone others own what they write."""
    monkeypatch.setattr("os.getuid", lambda: uid)
    request = SandboxRequest(
        name="n",
        command=["agent"],
        root=Path("/s/r"),
        workdir=Path("/s/r/work"),
        env={},
        choice=SandboxChoice(kind="podman", image="x"),
        limits=HarnessLimits(),
    )
    assert ("--userns keep-id" in " ".join(SANDBOXES["podman"](request).argv)) == keeps


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"])
def test_sandboxes_have_the_folders_at_the_names_that_a_task_knows(kind: str) -> None:
    task = tasks()[1]
    root = Path("/s/r")
    layout = HarborLayout(task["harbor"], root, root / "work", kind)
    request = SandboxRequest(
        name="n",
        command=["bash", "/tests/test.sh"],
        root=root,
        workdir=root / "work",
        env={"HOME": "/s/r/home"},
        choice=SandboxChoice(kind=kind),
        limits=HarnessLimits(),
        image=layout.image or layout.tag,
        mounts=layout.mounts(grading=True),
    )
    argv = " ".join(SANDBOXES[kind](request).argv)
    if kind == "docker":
        assert "--volume /s/r/work:/app --volume /s/r/logs:/logs --volume /s/r/tests:/tests" in argv
        assert argv.endswith(
            f"--workdir /app --env HOME=/s/r/home {layout.tag} bash /tests/test.sh"
        )
    else:
        assert "--bind /s/r/work /app --bind /s/r/logs /logs --bind /s/r/tests /tests" in argv
        assert argv.endswith("--chdir /app -- bash /tests/test.sh")
    assert "/tests" not in layout.mounts(grading=False)
