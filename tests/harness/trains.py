"""`make test-harness`: two optimizer steps on each kind of environment, with its real package, the
embedded engine and the quickstart's model: `stepwell train` as a user runs it.

Rewards are numbers of digits that the model writes: rollouts of a group differ in them, so that
there is something to train.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.files.trained import read_trained
from stepwell.trainer.metrics import read_metrics
from tests.harness.real import ROOT, openenv_server, python_beside

STEPS, GROUPS = 2, 2
ASKS = """
import json, os, pathlib, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 24}
request = urllib.request.Request(
    os.environ["BASE"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["KEY"]},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
pathlib.Path("answer.txt").write_text(said or "")
"""
ASKED = ["What is 12 + 30?", "What is 347 - 91?", "What is 800 + 5?", "What is 99 - 11?"]


def trained(folder: Path, rollout: dict[str, Any], data: dict[str, Any]) -> list[Any]:
    """Train on what is given; return the trajectories of both steps, and check that they changed
    the weights and lost nothing."""
    config: dict[str, Any] = {
        "data": {"train": data},
        "rollout": {"n": 4, "max_outstanding_groups": GROUPS, "max_tokens": 24, **rollout},
        "trainer": {"total_steps": STEPS, "train_batch_size": GROUPS},
        "validation": {"before_train": False, "every": 0},
        "logging": {"wandb": "disabled", "console": "plain"},
        "run": {"dir": str(folder / "run"), "resume": "never"},
    }
    (folder / "mine.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "stepwell", "train", "--config", str(folder / "mine.yaml")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(folder / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    assert all(record["grad_norm"] > 0 for record in records), records
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["optimizer_steps"] == STEPS
    found: list[Any] = []
    for step in range(1, STEPS + 1):
        found += [each.trajectory for each in read_trained(folder / "run", step)]
    assert len(found) == STEPS * GROUPS * config["rollout"]["n"]
    return found


def rewards(trajectories: list[Any]) -> Counter[float]:
    return Counter(sum(step.reward or 0.0 for step in t.steps) for t in trajectories)


def test_a_folder_of_harbor_tasks_trains(tmp_path: Path) -> None:
    for i, question in enumerate(ASKED):
        task = tmp_path / "tasks" / f"sum-{i}"
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n')
        (task / "instruction.md").write_text(question)
        (task / "tests" / "test.sh").write_text(
            "digits=$(tr -cd 0-9 < /app/answer.txt)\necho ${#digits} > /logs/verifier/reward.txt\n"
        )
    (tmp_path / "asks.py").write_text(ASKS)
    harness = {
        "command": [sys.executable, str(tmp_path / "asks.py"), "{task.prompt}"],
        "env": {"BASE": "{base_url}/v1", "KEY": "{api_key}"},
    }
    data = {"kind": "harbor", "path": str(tmp_path / "tasks")}
    found = trained(tmp_path, {"harness": harness}, data)
    assert len(rewards(found)) > 1
    assert all(len(t.steps) == 1 for t in found)


TASKSET = """
import verifiers.v1 as vf

class AddsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        return float(sum(c.isdigit() for c in str(trace.nodes[-1].message.content)))

class Adds(vf.Taskset[AddsTask]):
    def load(self):
        for a in range(4):
            yield AddsTask(vf.TaskData(prompt=f"What is {a}3 + 2{a}?"), self.config.task)

__all__ = ["Adds"]
"""


def test_a_verifiers_environment_trains_through_its_own_train_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client renders prompts itself and calls /inference/v1/generate."""
    (tmp_path / "adds.py").write_text(TASKSET)
    data = {
        "kind": "verifiers",
        "taskset": "adds",
        "python": python_beside("vf-eval"),
        "client": "train",
        "config": {"agent": {"harness": {"id": "null"}}},
    }
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    harness = {"env": {"PYTHONPATH": str(tmp_path), "UV_SYSTEM_CERTS": "1"}}
    # An episode costs seconds of CPU for verifiers' imports alone.
    found = trained(tmp_path, {"harness": harness, "concurrency": 2, "n": 2}, data)
    assert len(rewards(found)) > 1
    dialects = {step.metadata.get("dialect") for t in found for step in t.steps}
    assert dialects == {"token_generate"}


DIGITS = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="e", step_count=0)
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(text="What is 12 + 30?", done=False, reward=None)
    def step(self, action, **kwargs):
        self._state.step_count += 1
        n = sum(c.isdigit() for c in action.message)
        done = self._state.step_count == 2
        return Heard(text=f"{n} digits. And now?", done=done, reward=float(n))
    @property
    def state(self):
        return self._state

app = create_app(Digits, Say, Heard, env_name="digits", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


async def test_an_openenv_environment_trains_each_reply_by_the_reward_of_its_step(
    tmp_path: Path,
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": q}) + "\n" for q in ASKED))
    async with openenv_server(tmp_path, DIGITS) as url:
        environment = {"url": url, "action_key": "message", "observation_key": "text"}
        data = {"kind": "jsonl", "path": str(tasks), "label_key": None}
        found = trained(tmp_path, {"environment": environment}, data)
    assert len(rewards(found)) > 1
    assert all([s.parent_index for s in t.steps] == [None, 0] for t in found)
