"""This module keeps a run's `run.json` in its Ray, too, so that whoever knows the Ray's address
finds the run without its folder.

    record_run(run, namespace) ──► key-value store of the GCS, under the id of the pool's actor
    recorded_runs()            ◄── of each pool that is alive on the Ray that this process is in

Ray ends the pool's actor with its run, however that ends. Does not own the file (`run/folder.py`).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from stepwell.cluster.parts import POOL_NAME
from stepwell.run.folder import RunFile

_NAMESPACE = b"stepwell_runs"


def record_run(run: RunFile, namespace: str) -> None:
    """Let the cluster know of `run`, whose pool is in `namespace`."""
    value = run.model_dump_json().encode()
    _internal_kv_put(_key(namespace), value, overwrite=True, namespace=_NAMESPACE)


def recorded_runs() -> list[RunFile]:
    """The live runs on the Ray that this process is connected to."""
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    found = []
    for namespace in [actor["namespace"] for actor in named if actor["name"] == POOL_NAME]:
        try:
            text = _internal_kv_get(_key(namespace), namespace=_NAMESPACE)
        except ValueError:
            continue  # its run has just ended
        if text is not None:  # it is up, not only its pool
            found.append(RunFile.model_validate_json(text))
    return found


def _key(namespace: str) -> bytes:
    """Key of a run, by the actor of its pool.

    Raises:
        ValueError: there is none.
    """
    pool: Any = ray.get_actor(POOL_NAME, namespace=namespace)
    return str(pool._actor_id.hex()).encode()
