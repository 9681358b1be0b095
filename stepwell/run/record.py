"""This module keeps a run's `run.json` in its Ray, too, so that whoever knows the Ray's address
finds the run without its folder.

    record_run(run) ──► named actor RunRecord, in the run's namespace ──► gone with the run
    recorded_runs() ◄── all of them on the Ray that this process is connected to

Does not own the file (`run/folder.py`).
"""

from __future__ import annotations

from typing import Any

import ray

from stepwell.cluster.placement import on_this_node
from stepwell.run.folder import RunFile

NAME = "run_record"
ANSWER_S = 10.0


class RunRecord:
    """An actor that knows one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self) -> str:
        return self._text


async def record_run(run: RunFile, namespace: str) -> Any:
    """The handle of the record, which is there now and ends with the handle, or this process."""
    actor: Any = ray.remote(RunRecord).options(
        name=NAME,
        namespace=namespace,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=on_this_node(),
    )
    record = actor.remote(run.model_dump_json())
    await record.read.remote()
    return record


def recorded_runs() -> list[RunFile]:
    """The runs on the Ray that this process is connected to."""
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    found = []
    for actor in named:
        if actor["name"] == NAME:
            try:
                record: Any = ray.get_actor(NAME, namespace=actor["namespace"])
                text = ray.get(record.read.remote(), timeout=ANSWER_S)
            except (ray.exceptions.RayError, ValueError):
                continue  # its run has just ended
            found.append(RunFile.model_validate_json(text))
    return found
