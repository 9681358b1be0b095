"""This module evaluates a model, or a checkpoint of a run, and trains nothing: `stepwell eval`.

    RUN     its tasks, agent and reward, with the weights of a checkpoint; in RUN/eval
    MODEL   the tasks of a preset or file; in runs/eval-MODEL

It is `stepwell train` with `validation.only`: engines, gateway and rollouts are those of training,
so a score is what training would have measured. Owns which configuration that is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepwell.backends.config import EngineConfig
from stepwell.config.load import eval_config, load_config, named_as
from stepwell.config.run import RunConfig
from stepwell.layout import CHECKPOINTS, RUN_FILE
from stepwell.run.folder import holder, read_run
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.errors import ConfigError


def evaluation_of(
    what: str,
    step: int | Literal["latest", "best"] = "latest",
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration of the evaluation.

    Args:
        what: the folder of a run or a model, or a model's id on the hub.
        step: of the run's checkpoint.
        name: of the preset or file that says on what a model is evaluated.

    Raises:
        ConfigError: there is no such run, no task, or a key is wrong.
        NoCheckpointError: the run has no such checkpoint.
    """
    folder = Path(what).absolute()
    if not (folder / RUN_FILE).is_file():
        if name is None and not overrides:
            is_there = "is no run's folder" if folder.exists() else "does not exist here"
            raise ConfigError(
                f"{what} {is_there}; name a run's folder, such as runs/quickstart; to evaluate a "
                "model, say on what: --config PRESET or rollout.agent=MODULE:FUNCTION "
                "data.val=TASKS.jsonl"
            )
        if step != "latest":
            raise ConfigError(
                f"--step is {step}, of a run's checkpoints, and {what} is no run's folder"
            )
        run = f"eval-{named_as(Path(what).name or 'model')}"
        own = [f"run.name={run}", "logging.wandb=disabled", "logging.console=quiet"]
        only = [f"model.path={json.dumps(what)}", "validation.only=true"]
        return load_config(name, [*own, *overrides, *only])
    if name is not None:
        raise ConfigError(
            f"--config is {name}, but {what} is a run, which has a configuration; leave it out"
        )
    run_file = read_run(folder)
    values = run_file.config
    if values.get("rollout", {}).get("agent") is None:
        raise ConfigError(
            f"the run in {what} learns from live traffic and has no tasks; evaluate an exported "
            "model instead (`stepwell export`), with --config or rollout.agent and data.val"
        )
    checkpoint = CheckpointStore(folder / CHECKPOINTS).chosen(step)
    here = Path.cwd()
    if run_file.folder.is_dir():  # relative paths and modules mean what they meant to the run
        os.chdir(run_file.folder)
        sys.path.insert(0, str(run_file.folder))
    config = eval_config(folder, values, checkpoint, overrides, here)
    engine, its = config.engine, EngineConfig.model_validate(values["engine"])
    serving = () if run_file.engines is None else run_file.engines.urls
    shared = {*engine.urls, engine.router_url} & {*serving, *its.urls, its.router_url} - {None}
    if shared and holder(folder) is not None:
        raise ConfigError(
            f"the run in {what} is alive, and its engines ({', '.join(map(str, shared))}) would "
            "get the checkpoint's weights; stop it first, or give engine.urls=[…] of others"
        )
    return config


def score_screen(evaluation: dict[str, Any], folder: Path) -> RenderableType:
    """The figures of an evaluation, as the summary of a run has them."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("score", f"{evaluation['score']:.3f}")
    for key, value in evaluation["metrics"].items():
        table.add_row(key.removeprefix("val/"), f"{value:.3f}")
    if evaluation["tool_use"] is not None:
        table.add_row("tool use", f"{evaluation['tool_use']:.3f}")
    table.add_row("rollouts", f"{evaluation['rollouts']}")
    if evaluation["failed"]:
        table.add_row("failed", f"{evaluation['failed']}")
    replies = folder / "validation" / f"step_{evaluation['step']}.jsonl"
    return Group(table, "", Text(f"replies: {replies}", no_wrap=True, overflow="ignore"))
