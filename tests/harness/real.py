"""`make test-harness`: each preset's real program, against the real gateway and a scripted engine.

The model calls the harness's shell once, which writes the answer, and ends. So a rollout shows that
the command line works, the work folder is where the agent works, every Step is exact, and a linear
conversation is one branch. Programs are looked for on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from stepwell.backends.processes import spawn
from stepwell.config.run import RunConfig
from stepwell.trainer.config import HarborSource, RolloutConfig
from stepwell.trainer.config.environment import OpenEnvConfig
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.data.tasks import open_tasks
from stepwell.trainer.environments.openenv import OpenEnvAgent
from stepwell.trainer.errors import HarnessError
from stepwell.trainer.rollout.harness import Harness, folder_of_worker
from stepwell.trainer.rollout.worker import RolloutWorker
from tests.gateway.conftest import World, one_thread, worlds
from tests.helpers import reserved_port
from tests.trainer.test_harness import scratch
from tests.trainer.test_rollout import RecordingGateway, gateway

__all__ = ["gateway", "one_thread", "scratch", "worlds"]

WRITE = "echo 5 > answer"
TASK = {"instance_id": "sum", "question": "- Write 2 + 3 into the file answer.", "answer": "5"}


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"I write it.\n<tool_call>\n{body}\n</tool_call>"


BASH = call("bash", command=WRITE)
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
REPLIES: dict[str, list[str]] = {
    "claude_code": [call("Bash", command=WRITE, description="Write it"), "It is there."],
    "codex": [call("exec_command", cmd=WRITE), "It is there."],
    "opencode": [call("bash", command=WRITE, description="Write it"), "It is there."],
    "qwen_code": [call("run_shell_command", command=WRITE, is_background=False), "It is there."],
    "gemini_cli": [call("run_shell_command", command=WRITE), "It is there."],
    "aider": ["I write it.\n\nanswer\n```\n5\n```\n"],
    "mini_swe_agent": [BASH, call("bash", command=DONE)],
    "pi": [BASH, "It is there."],
}


@pytest.mark.parametrize("name", PRESETS)
async def test_a_rollout_of_the_real_program_is_exact_and_one_branch(
    name: str, worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world: World = await worlds()
    world.engine.context_length = 200_000
    for text in REPLIES[name]:
        world.say(text)
    config = HarnessConfig.model_validate(
        {
            "preset": name,
            "timeout_s": 200,
            "grade": {"command": ["sh", "-c", 'test "$(cat answer)" = {task.answer}']},
        }
    )
    run = Harness(config, logs=tmp_path / "logs")
    reward = await run(TASK, world.base_url(), "none")
    (said,) = (tmp_path / "logs").iterdir()
    assert reward == 1.0, said.read_text()
    world.check_exact()
    steps = world.stored()
    assert TASK["question"] in world.gateway.tokenizer.decode(steps[0].prompt_ids.tolist())
    assert [s.parent_index for s in steps] == [None, *range(len(steps) - 1)], said.read_text()
    assert len(steps) == len(REPLIES[name])
    assert not [*folder_of_worker(tmp_path / "s").iterdir()]


async def test_bubblewrap_hides_homes_and_writes_nowhere_else(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    """`bwrap` itself, which the default suite plans only."""
    world: World = await worlds()
    script = """
        touch /usr/x /home/x /run/x 2>/dev/null && exit 3; ls ~root | grep . && exit 4
        test "$(ps -e | wc -l)" -lt 10 || exit 5
        touch "$HOME/x" "$TMPDIR/x" /tmp/x && pwd > here
    """
    config = HarnessConfig.model_validate(
        {
            "command": ["sh", "-c", script],
            "sandbox": "bubblewrap",
            "grade": {"command": ["grep", "work", "here"]},
        }
    )
    assert await Harness(config)(TASK, world.base_url(), "none") == 1.0


# -- containers ------------------------------------------------------------------------------

IMAGE = "localhost/stepwell-test:1"
PROGRAMS = ("bash", "cat", "cp", "grep", "head", "ls", "mkdir", "sleep", "touch", "tr")
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
ASKS = rf"""
    rest=${{BASE#http://}}; at=${{rest%%/*}}
    exec 3<>/dev/tcp/${{at%:*}}/${{at#*:}}
    printf '%s\r\n' "POST /${{rest#*/}}/v1/chat/completions HTTP/1.1" "host: $at" >&3
    printf '%s\r\n' "authorization: Bearer $KEY" 'content-type: application/json' >&3
    printf '%s\r\n' 'content-length: {len(BODY)}' 'connection: close' '' >&3
    printf '%s' '{BODY}' >&3
    grep -o 'It is 5' <&3 > answer
    ls /home /root /work 2>/dev/null | grep . && exit 4
    exit 0
"""
"""A harness that calls the gateway with nothing but bash."""


def podman(*arguments: str) -> str:
    """Output of a command of podman, which has to succeed."""
    return subprocess.run(
        ["podman", *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.fixture
def image(tmp_path: Path) -> str:
    """An image of this machine's bash and a few more programs: no registry is asked."""
    root = tmp_path / "image"
    for program in PROGRAMS:
        found = shutil.which(program, path="/usr/bin:/bin")
        assert found is not None
        libraries = subprocess.run(["ldd", found], capture_output=True, text=True, check=True)
        for file in (found, *re.findall(r"(/\S+) \(", libraries.stdout)):
            to = root / file.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)
    (root / "usr" / "bin" / "sh").symlink_to("bash")
    (root / "bin").symlink_to("usr/bin")
    (root / "Dockerfile").write_text("FROM scratch\nENV PATH=/usr/bin:/bin\nCOPY . /\n")
    podman("build", "--quiet", "--tag", IMAGE, str(root))
    return IMAGE


def in_podman(tmp_path: Path, image: str, script: str, **keys: Any) -> Harness:
    section = {
        "command": ["bash", "-c", script],
        "env": {"BASE": "{base_url}", "KEY": "{api_key}"},
        "sandbox": {"kind": "podman", "image": image},
        "grade": {"command": ["bash", "-c", 'test "$(cat answer)" = "It is 5"']},
        **keys,
    }
    return Harness(HarnessConfig.model_validate(section), logs=tmp_path / "logs")


async def test_a_container_of_podman_calls_the_gateway_and_sees_its_own_folder_alone(
    worlds: Callable[..., Any], tmp_path: Path, image: str
) -> None:
    world: World = await worlds()
    world.say("It is 5")
    run = in_podman(tmp_path, image, ASKS)
    reward = await run(TASK, world.base_url(), "none")
    (said,) = (tmp_path / "logs").iterdir()
    assert reward == 1.0, said.read_text()
    world.check_exact()
    assert len(world.stored()) == 1


@pytest.mark.parametrize(
    ("script", "limits", "error", "why"),
    [
        ("sleep 600 & sleep 600", {}, TimeoutError, "ran longer than 5 s"),
        (
            "x=$(head -c 300000000 /dev/zero | tr '\\0' x); sleep 600",
            {"memory_mb": 64},
            HarnessError,
            "exit status 137|killed by SIGKILL|limits: memory",
        ),
    ],
)
async def test_a_container_that_hangs_or_eats_memory_is_ended_and_leaves_nothing(
    tmp_path: Path,
    image: str,
    script: str,
    limits: dict[str, Any],
    error: type[Exception],
    why: str,
) -> None:
    run = in_podman(tmp_path, image, script, timeout_s=5 if not limits else 100, limits=limits)
    with pytest.raises(error, match=why):
        await run(TASK, "http://127.0.0.1:9/u/p", "none")
    names = podman("ps", "--all", "--format", "{{.Names}}")
    assert "stepwell-harness" not in names
    assert not [*folder_of_worker(tmp_path / "s").iterdir()]


EACH = 10
BAD = {
    "crash": ("echo oops >&2; exit 3", "exit status 3: oops"),
    "signal": ("kill -SEGV $$", "exit status 139"),
    "hang": ("trap '' TERM; sleep 600", "timeout"),
    "forks": ("for i in {1..60}; do sleep 600 & done; wait", "processes"),
    "disk": ("head -c 40000000 /dev/zero > /tmp/big; sleep 600", "disk"),
    "files": ("for i in {1..900}; do : > $i; done; sleep 600", "files"),
    "output": ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", "output"),
    "memory": ("x=$(head -c 900000000 /dev/zero | tr '\\0' x); sleep 600", "memory"),
    "children": ("(sleep 600 &); sleep 601 & exit 4", "exit status 4"),
    "no_such_program": ("exec nowhere", "exit status 127"),
}
"""Bad commands of a harness, as bash runs them, and the reason of each loss."""


@pytest.mark.parametrize("kind", ["bubblewrap", "podman"])
async def test_a_hundred_bad_rollouts_of_a_sandbox_are_lost_each_with_its_reason(
    kind: str, tmp_path: Path, gateway: RecordingGateway, request: pytest.FixtureRequest
) -> None:
    """Losses in sandboxes; `tests/trainer/test_harness.py` has those of processes."""
    sandbox = {"kind": kind}
    if kind == "podman":
        sandbox["image"] = request.getfixturevalue("image")
    cases = "\n".join(f"{name}) {script} ;;" for name, (script, _) in BAD.items())
    section = {
        "command": ["bash", "-c", f'case "$1" in\n{cases}\nesac', "bash", "{task.prompt}"],
        "limits": {"processes": 40, "disk_mb": 8, "files": 500, "output_mb": 1, "memory_mb": 512},
        "sandbox": sandbox,
        "grade": {"command": ["true"]},
    }
    ends: Counter[str] = Counter()

    async def run(timeout_s: float, kinds: Sequence[str]) -> None:
        given = {"harness": {**section, "timeout_s": timeout_s}, "max_attempts": 1, "n": EACH}
        config = RolloutConfig.model_validate({**given, "concurrency": 4})
        worker = RolloutWorker(config, [gateway.url], logs=tmp_path / "logs")
        for kind in kinds:
            task = {"instance_id": kind, "question": kind}
            ends.update(await worker.run_group(task, kind, EACH))
        await worker.close()

    await run(5, ["hang"])
    await run(300, [kind for kind in BAD if kind != "hang"])
    assert ends.total() == EACH * len(BAD)
    assert not gateway.told("complete"), "nothing is scored, so nothing is scored 0"
    for name, (_, why) in BAD.items():
        reasons = [body["reason"] for body in gateway.told("abort") if why in body["reason"]]
        assert len(reasons) >= EACH, (name, ends)
    assert all(r == "timeout" or r.startswith("HarnessError: ") for r in ends), ends
    assert not [*folder_of_worker(tmp_path / "s").iterdir()]
    if kind == "podman":
        assert "stepwell-harness" not in podman("ps", "--all", "--format", "{{.Names}}")
    scratch = str(tmp_path / "s")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            assert not process.environ().get("HOME", "").startswith(scratch), process.cmdline()


async def test_a_harbor_task_is_built_run_and_graded_in_its_own_image(
    tmp_path: Path, image: str
) -> None:
    """The agent and the tests find what the Dockerfile has made, and what the agent left; a
    Dockerfile that changed is built anew."""
    task = tmp_path / "tasks" / "greet"
    shutil.copytree(ROOT / "tests" / "trainer" / "harbor_tasks" / "greet", task)
    dockerfile = f"FROM {image}\nWORKDIR /app\nCOPY name.txt data/\nRUN echo hello > /app/built\n"
    (task / "environment" / "Dockerfile").write_text(dockerfile)
    (found,) = open_tasks(HarborSource(kind="harbor", path=task))
    script = "cat built > /app/greeting.txt"
    run = in_podman(tmp_path, image, script, sandbox={"kind": "podman"}, grade=None)
    assert await run(found, "http://127.0.0.1:9/u/p", "none") == 1.0
    (task / "environment" / "Dockerfile").write_text(dockerfile.replace("hello", "bye"))
    run = in_podman(tmp_path, image, script, sandbox={"kind": "podman"}, grade=None)
    assert await run(found, "http://127.0.0.1:9/u/p", "none") == 0.0


# -- environments ----------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
TASKSET = """
import verifiers.v1 as vf

class AddsData(vf.TaskData):
    answer: str = ""

class AddsTask(vf.Task[AddsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.nodes[-1].message.content))

class Adds(vf.Taskset[AddsTask]):
    def load(self):
        for a in range(3):
            data = AddsData(prompt=f"What is {a} + 2?", answer=str(a + 2))
            yield AddsTask(data, self.config.task)

__all__ = ["Adds"]
"""


def python_beside(program: str) -> str:
    """The Python of the environment that has the program."""
    found = shutil.which(program)
    assert found is not None, f"{program} is not on the PATH: make test-harness installs it"
    return str(Path(found).parent / "python")


@pytest.mark.parametrize("client", ["eval", "train"])
async def test_an_episode_of_verifiers_is_a_rollout_with_its_reward(
    client: str, worlds: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line of the page. Its train client renders by itself, and calls
    /inference/v1/generate."""
    world: World = await worlds("quickstart")
    world.say("It is 3.")
    (tmp_path / "adds.py").write_text(TASKSET)
    page = (ROOT / "docs" / "harnesses.md").read_text()
    (block,) = re.findall(r"```yaml\n(data: \{ train: \{ kind: verifiers.*?)```", page, re.S)
    given = yaml.safe_load(block)
    source = given["data"]["train"] | {"python": python_beside("vf-eval"), "client": client}
    env = {"PYTHONPATH": str(tmp_path), "UV_SYSTEM_CERTS": "1"}
    if client == "train":  # it renders a model without a renderer of its own, and knows no tools
        source["config"] = {"agent": {"harness": {"id": "null"}}}
    run = RunConfig.model_validate(
        {
            "model": {"path": str(ROOT / "examples" / "quickstart" / "model")},
            "data": {"train": source},
            "rollout": {"harness": {"env": env, "timeout_s": 200}},
        }
    )
    assert run.data is not None
    assert run.data.train is not None
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = open_tasks(run.data.train)
    assert len(tasks) == 3
    config = run.rollout.harness
    assert config is not None
    assert await Harness(config, logs=tmp_path / "logs")(tasks[1], world.base_url(), "none") == 1.0
    world.check_exact()
    (step,) = world.stored()
    assert step.metadata["dialect"] == ("openai_chat" if client == "eval" else "token_generate")


ECHO = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    echoed: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="e", step_count=0)
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(echoed="say yes", done=False, reward=None)
    def step(self, action, **kwargs):
        self._state.step_count += 1
        right = action.message == "yes"
        return Heard(echoed=action.message, done=right, reward=float(right))
    @property
    def state(self):
        return self._state

app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@asynccontextmanager
async def openenv_server(folder: Path, program: str) -> AsyncIterator[str]:
    (folder / "server.py").write_text(program)
    with reserved_port() as held:
        port = held.getsockname()[1]
    child = await spawn([python_beside("openenv"), str(folder / "server.py"), str(port)])
    try:
        async with aiohttp.ClientSession() as http:
            while child.process.returncode is None:
                try:
                    await http.get(f"http://127.0.0.1:{port}/health")
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        await child.process.wait()


async def test_an_episode_of_openenvs_own_server_is_a_rollout_with_its_rewards(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world: World = await worlds()
    for text in ("no", "yes"):
        world.say(text)
    async with openenv_server(tmp_path, ECHO) as url:
        agent = OpenEnvAgent(OpenEnvConfig(url=url, action_key="message", observation_key="echoed"))
        assert await agent({"question": ""}, world.base_url(), "none") == [0.0, 1.0]
    world.check_exact()
    assert [s.parent_index for s in world.stored()] == [None, 0]


async def test_harbor_itself_reads_our_sample_tasks() -> None:
    folder = ROOT / "tests" / "trainer" / "harbor_tasks"
    code = "import sys; from harbor.models.task.task import Task; Task(sys.argv[1])"
    for task in folder.iterdir():
        child = await spawn([python_beside("harbor"), "-c", code, str(task)])
        assert await child.process.wait() == 0
        child.kill()


def test_harbor_itself_reads_the_job_that_the_page_shows() -> None:
    """Its agents are at our gateway: `AgentConfig.base_url`."""
    page = (ROOT / "docs" / "harbor.md").read_text()
    (job,) = re.findall(r"```yaml\n# job\.yaml.*?\n(.*?)```", page, re.S)
    code = """
import sys, yaml
from harbor.models.job.config import JobConfig
(agent,) = JobConfig.model_validate(yaml.safe_load(sys.argv[1])).agents
print(agent.base_url)
"""
    argv = [python_beside("harbor"), "-c", code, job]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "http://HOST:8100/UID/hello-world"
