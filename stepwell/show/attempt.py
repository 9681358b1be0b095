"""This module runs one rollout of a harness and shows what came of it: `stepwell try`.

    HARNESS ──► configuration ──► a gateway of its own, or that of a live run ──► one rollout
                                                                                     │
        the tree of its calls, its reward; or why it failed and the end of its log ◄─┘

The rollout is of a channel of its own, which nobody trains. Owns which configuration that is. Does
not own the rollout (`trainer/rollout/`) nor how trees are drawn (`trajectory.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from rich.console import Group, RenderableType
from rich.text import Text

from stepwell.backends.processes import last_lines
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient
from stepwell.datapool.files.archive.lookup import locate_in_pool
from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.layout import LOGS, SERVE_LOG
from stepwell.run.checks import agent, check_serving, named
from stepwell.run.folder import GatewayPart, only_run_in
from stepwell.run.serve import logged, start_run, starting, take_folder
from stepwell.show.run import open_run
from stepwell.show.trajectory import Opened, opened_of, trajectory_screen
from stepwell.track.console import safe
from stepwell.track.output import print_line
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.data.tasks import Task, open_tasks
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.rollout.producer import as_metadata, new_uid
from stepwell.trainer.rollout.worker import RolloutWorker

CHANNEL = "try"
LONGEST_S = 14_400
"""Seconds that the rollout of a preset has, if its own times leave it so many."""
LOG = "harness"
"""Folder of harnesses' logs, in a run's."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The end of the rollout."""

    ended: str
    """`complete`, or why it failed."""
    log: Path
    """File of what the harness printed; the folder of such files, if there is none."""
    opened: Opened | None = None
    """Its calls; None: it made none, or failed."""

    def as_json(self) -> dict[str, Any]:
        branches = None if self.opened is None else self.opened.rows
        return {"ended": self.ended, "log": str(self.log), "branches": branches}


def config_of_try(
    harness: str, asked: str | int, name: str | None, overrides: Sequence[str]
) -> tuple[RunConfig, Task]:
    """The configuration of one rollout of `harness`, and its task.

    Args:
        harness: a preset of `rollout.harness`, or a configuration that has one.
        asked: a prompt; or the number, from 0, of a task of the configuration's data.
        name: of the configuration that says which model is served.

    Raises:
        ConfigError: it is neither, a key is wrong, or there is no such task.
    """
    chosen = [f"rollout.harness={harness}"]
    if harness not in PRESETS:
        if name is not None or not harness.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"HARNESS is {harness!r}; give one of {', '.join(PRESETS)}, or a configuration "
                "with rollout.harness, such as mine.yaml"
            )
        name, chosen = harness, []
    own = ["run.name=try", "run.resume=never", "gateway.port=0"]
    own += ["rollout.n=1", "rollout.min_n=1", "rollout.max_attempts=1"]
    if harness in PRESETS:
        own.append("rollout.agent=null")  # the configuration's
        # Its own times end it, not those of the agent that the configuration has.
        own += [f"rollout.timeout_s={LONGEST_S}", f"rollout.group_deadline_s={LONGEST_S}"]
    task: Task = {"instance_id": "try", "data_source": "try", "answer": None, "metadata": {}}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as tasks:
        if isinstance(asked, str):
            task["question"] = asked
            json.dump(task, tasks)
            tasks.flush()
            own.append(f"data={tasks.name}")
        config = load_config(name, [*own, *chosen, *overrides])
    if config.rollout.harness is None:
        raise ConfigError(f"{harness} has no rollout.harness; name one, e.g. claude_code")
    agent(config)
    return config, task if isinstance(asked, str) else _task(config, asked)


def _task(config: RunConfig, number: int) -> Task:
    if config.data is None or config.data.train is None:
        raise ConfigError(f"--task is {number}, but there is no data.train to take it from")
    with named("data.train"):
        tasks = open_tasks(config.data.train, config.model.path)
    if not 0 <= number < len(tasks):
        raise ConfigError(f"--task is {number}; data.train has tasks 0 to {len(tasks) - 1}")
    return tasks[number]


async def attempt(config: RunConfig, task: Task) -> Tried:
    """Run the rollout against a gateway of its own.

    Raises:
        ConfigError: it cannot be run here.
    """
    check_serving(config)
    folder = config.run.dir
    with only_run_in(folder):
        run = take_folder(config, trains=False)
        with logged(folder, SERVE_LOG):
            print_line(starting(config), sys.stderr)
            async with start_run(config, run, trains=False) as cluster:
                gateway = GatewayPart(urls=cluster.gateway_urls, key_file=cluster.key_file)
                tokenizer = config.gateway.tokenizer_path or config.model.path
                return await _rollout(
                    config,
                    task,
                    cluster.pool,
                    gateway.urls,
                    gateway.key(),
                    str(tokenizer),
                )


async def attempt_at(config: RunConfig, task: Task, run: str) -> Tried:
    """Run the rollout against the gateway of the live run at `run`.

    Raises:
        ConfigError: it is not alive, or serves nobody.
    """
    async with open_run(run) as view:
        if not view.is_alive or view.run.gateway is None:
            raise ConfigError(f"--run is {run!r}, which serves nobody now; start `stepwell serve`")
        gateway = view.run.gateway
        tokenizer = view.tokenizer_path()
        return await _rollout(config, task, view.pool, gateway.urls, gateway.key(), tokenizer)


async def _rollout(
    config: RunConfig,
    task: Task,
    pool: DataPoolClient,
    urls: Sequence[str],
    key: SecretStr | None,
    tokenizer: str | None,
) -> Tried:
    prompt_uid = new_uid(task)
    deadline_s = config.rollout.group_deadline_s
    about = {"task": as_metadata(task)}
    await pool.open_group(prompt_uid, 1, deadline_s, metadata=about, channel=CHANNEL)
    folder = config.run.dir.absolute() / LOGS / LOG
    others = set(folder.glob("*.log"))
    run_dir = config.run.dir.absolute()
    worker = RolloutWorker(config.rollout, urls, key, logs=folder, run_dir=run_dir)
    try:
        (ended,) = await worker.run_group(task, prompt_uid, 1, CHANNEL)
    finally:
        await worker.close()
    # One that failed before its agent began has none.
    log = next((file for file in folder.glob("*.log") if file not in others), folder)
    page = await pool.list_trajectories(CHANNEL, limit=10, prompt_uid=prompt_uid)
    for row in page.items:
        found = await locate_in_pool(row.trajectory_uid, pool, [CHANNEL])
        if found is not None and found.exported.trajectory.steps:
            return Tried(ended, log, opened_of(found.exported, _tokens(tokenizer)))
    return Tried(ended, log)


def _tokens(path: str | None) -> ChatTokenizer | None:
    try:
        return None if path is None else ChatTokenizer.load(path)
    except GatewayConfigError:  # ids are shown
        return None


def try_screen(tried: Tried) -> RenderableType:
    """The tree and text of the rollout; of one that failed, why, and the end of its log."""
    lines: list[RenderableType] = []
    if tried.opened is not None:
        lines += [trajectory_screen(tried.opened), ""]
    if tried.ended != "complete":
        lines.append(Text(f"failed: {safe(tried.ended)}", "red"))
        said = last_lines(tried.log) if tried.log.is_file() else ""
        lines += [Text(safe(line), "dim") for line in said.splitlines()]
    lines.append(Text(f"log: {tried.log}", no_wrap=True, overflow="ignore"))
    return Group(*lines)
