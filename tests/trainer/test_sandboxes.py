"""The command lines of sandboxes, which need no sandbox to be planned."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.trainer.config.harness import HarnessLimits, SandboxChoice
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.rollout.sandboxes import (
    SANDBOXES,
    SandboxPlan,
    SandboxRequest,
    client_env,
    find_sandbox,
)

ROOT = Path("/tmp/r")
URL = "http://127.0.0.1:8100/t/p/v1"
REQUEST = SandboxRequest(
    name="stepwell-harness-a",
    command=["agent", "-p", "do it", URL],
    root=ROOT,
    workdir=ROOT / "work",
    env={"PATH": "/bin", "HOME": "/tmp/r/home", "OPENAI_BASE_URL": URL, "KEY": "secret"},
    choice=SandboxChoice(),
    limits=HarnessLimits(memory_mb=512, processes=64, cpu_s=100),
)


def plan(**choice: object) -> SandboxPlan:
    chosen = SandboxChoice.model_validate(choice)
    return SANDBOXES[chosen.kind](replace(REQUEST, choice=chosen))


def test_a_process_is_the_command_itself() -> None:
    assert plan() == SandboxPlan(("agent", "-p", "do it", URL), REQUEST.env)


def test_bubblewrap_sees_nobodys_home_and_writes_in_the_rollouts_folder_alone() -> None:
    argv = " ".join(plan(kind="bubblewrap", visible=["/root/tools"]).argv)
    assert argv == (
        "bwrap --die-with-parent --new-session --unshare-pid --unshare-ipc --unshare-uts "
        "--ro-bind / / --dev /dev --proc /proc "
        "--bind /tmp/r/tmp /tmp --bind /tmp/r/tmp /var/tmp "
        "--tmpfs /home --tmpfs /root --tmpfs /run "
        "--ro-bind /root/tools /root/tools --bind /tmp/r /tmp/r "
        "--remount-ro /home --remount-ro /root --remount-ro /run "
        f"--chdir /tmp/r/work -- agent -p do it {URL}"
    )


def test_bubblewrap_hides_a_folder_and_shows_one_whichever_is_within_the_other() -> None:
    chosen = SandboxChoice.model_validate({"kind": "bubblewrap", "visible": ["/p", "/w/tools"]})
    hidden = [Path("/w"), Path("/p/tests")]
    argv = " ".join(SANDBOXES["bubblewrap"](replace(REQUEST, choice=chosen, hidden=hidden)).argv)
    assert (
        "--tmpfs /w --ro-bind /p /p --tmpfs /p/tests --ro-bind /w/tools /w/tools --bind /tmp/r"
    ) in argv
    assert "--remount-ro /w --remount-ro /p/tests --chdir /tmp/r/work" in argv, "nothing goes there"


CONTAINER = (
    "{program} run --rm --init --name stepwell-harness-a --network host --user {user}{more} "
    "--cap-drop ALL --security-opt no-new-privileges --memory 512m --pids-limit 64 --cpus 1.5 "
    "--ulimit cpu=100 --volume /tmp/r/tmp:/tmp --volume /tmp/r/tmp:/var/tmp "
    "--volume /tmp/r:/tmp/r --volume /opt/node:/opt/node:ro "
    "--workdir /tmp/r/work --env HOME=/tmp/r/home --env KEY --env OPENAI_BASE_URL "
    "node:22 agent -p do it {url}"
)


@pytest.mark.parametrize(
    ("program", "user", "more"),
    [
        ("docker", 1000, ""),
        ("podman", 1000, " --userns keep-id"),
        ("podman", 0, ""),  # root's podman refuses it
    ],
)
def test_a_container_is_bounded_and_removed_and_no_key_is_in_its_command_line(
    program: str, user: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "getgid", lambda: user)
    planned = plan(kind=program, image="node:22", visible=["/opt/node"], cpus=1.5)
    expected = CONTAINER.format(program=program, user=f"{user}:{user}", more=more, url=URL)
    assert " ".join(planned.argv) == expected
    assert "secret" not in expected
    assert planned.env == {**REQUEST.env, **client_env()}, "the program's home is its user's"
    assert list(planned.after) == [program, "rm", "--force", "stepwell-harness-a"]


@pytest.mark.parametrize(
    ("program", "host"),
    [("docker", "host.docker.internal"), ("podman", "host.containers.internal")],
)
def test_a_container_of_another_network_calls_the_host_by_its_name(program: str, host: str) -> None:
    planned = plan(kind=program, image="node:22", network="agents")
    called = URL.replace("127.0.0.1", host)
    assert planned.env["OPENAI_BASE_URL"] == called
    assert planned.argv[-1] == called
    assert ("--add-host" in planned.argv) == (program == "docker")


def mine(request: SandboxRequest) -> SandboxPlan:
    return SandboxPlan(["ssh", "box", *request.command], request.env)


def test_a_sandbox_of_yours_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_sandbox(SandboxChoice(kind=f"{__file__}:mine"))(REQUEST).argv[:2] == ["ssh", "box"]
    monkeypatch.setenv("PATH", "/nowhere")
    for kind, program in (("bubblewrap", "bwrap"), ("podman", "podman")):
        with pytest.raises(RolloutError, match=f"there is no {program} on the PATH; install"):
            find_sandbox(SandboxChoice(kind=kind, image="i" if kind == "podman" else None))
