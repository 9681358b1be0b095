"""This module tells what becomes of a configuration that was changed before a run goes on, so that
nobody guesses which value is in force.

    applies       whatever the checkpoint does not hold: lr, n, advantage, losses, engines, …
    stays         what it does: the random state and the order of prompts (run.seed), an adapted
                  KL coefficient
    is refused    what its state cannot be used with: another model, optimizer, adapter or data

The checkpoint's `about.json` holds the configuration it was written with. Owns the comparison. Does
not own the state (`trainer/checkpoint.py`) or where it is refused (`run/checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepwell.backends.model_folder import fingerprint
from stepwell.config.keys import leaves
from stepwell.config.run import RunConfig
from stepwell.config.secrets import without_secrets
from stepwell.layout import WEIGHTS
from stepwell.trainer.data import FREE
from stepwell.trainer.errors import ConfigError

_UNTOLD = (
    "run.name",
    "run.dir",
    "run.resume",
    "logging.",
    "cluster.",
    "model.",
    "engine.model_path",
    "gateway.tokenizer_path",
)
"""Keys of which no change is reported: a run's place, what shows it, and the model, which may
only have moved."""
_TRAINED = ("data.train", "data.sft")
_OF_RUN_SEED = (
    *(f"{data}.shuffle_seed" for data in (*_TRAINED, "data.val")),
    "backend.seed",
    "engine.seed",
)
_REFUSED = (
    "trainer.backend.",
    "backend.optimizer.",
    "backend.lora.",
    *(f"{data}." for data in _TRAINED),
)
_FREE = tuple(f"{data}.{name}" for data in _TRAINED for name in FREE)
_OF_GROUPS = {"rollout.n", "rollout.min_n"}
START_OVER = "or start over: run.resume=never, or another run.name"
MOST = 8
"""Changes that are told one by one."""


def origin(config: RunConfig, tasks: int | None) -> dict[str, Any]:
    """Return the entries of this run for the `about.json` of every checkpoint.

    Args:
        tasks: in an epoch of `data.train`; None: agents bring theirs.
    """
    return {
        "model_path": str(config.model.path.absolute()),
        "model": fingerprint(config.model.path),
        "backend": config.trainer.backend,
        "backend_config": config.backend.model_dump(mode="json"),
        "tasks": tasks,
        "config": without_secrets(config),
    }


def check_resumed(checkpoint: Path, about: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError: a run so configured cannot go on from `checkpoint`."""
    if "config" not in about:  # of a release that did not note it: loading it will tell
        return
    remedy = _remedy(checkpoint, about, config)
    if about["model"] != fingerprint(config.model.path):
        raise ConfigError(
            f"model.path is {str(config.model.path)!r}, but the checkpoint {checkpoint} is of the "
            f"weights in {about['model_path']}; set model.path back, {remedy}"
        )
    refused = []
    for key, (was, now) in _changes(about, config).items():
        if config.data is None and key.startswith("data."):
            continue  # agents bring their tasks now: nobody asks for the place in those of before
        if f"{key}.".startswith(_REFUSED) and not key.startswith(_FREE):
            refused.append(f"{key} was {was!r} and is {now!r}")
    if refused:
        raise ConfigError(
            f"{'; '.join(refused[:3])}: the checkpoint {checkpoint} cannot go on with that; set it "
            f"back, {remedy}"
        )


def check_same_data(checkpoint: Path, about: Mapping[str, Any], tasks: int) -> None:
    """Raises ConfigError: the data has other rows than when the checkpoint was written."""
    was = about.get("tasks")
    if was is not None and was != tasks:
        raise ConfigError(
            f"data.train had {was} tasks when the checkpoint {checkpoint} was written and has "
            f"{tasks}: its place in them is lost; put the data back, {START_OVER}"
        )


def _remedy(checkpoint: Path, about: Mapping[str, Any], config: RunConfig) -> str:
    """Return how to go on otherwise: with the weights that another run has trained, from the start
    with this run's."""
    theirs = checkpoint.absolute().parents[1]
    if theirs == config.run.dir.absolute():
        return START_OVER
    weights = theirs / WEIGHTS / f"v{about.get('version', 'N')}"
    return (
        f"or begin a new run with the weights that were trained there: model.path={weights}, "
        "without run.resume"
    )


def told(about: Mapping[str, Any], config: RunConfig) -> list[str]:
    """A line on what was changed and applies, and one on what stays; none if nothing was."""
    if "config" not in about:
        return []
    changes = {
        key: change
        for key, change in _changes(about, config).items()
        if not key.startswith(_UNTOLD) and key not in _OF_RUN_SEED
    }
    stay = [key for key in changes if _stays(key, config)]
    apply = [
        f"{key} {_short(was)} → {_short(now)}"
        for key, (was, now) in changes.items()
        if key not in stay
    ]
    lines = []
    if apply:
        more = f" and {len(apply) - MOST} more" if len(apply) > MOST else ""
        pool = "; groups that the pool holds keep theirs" if changes.keys() & _OF_GROUPS else ""
        lines.append(f"changed, and applies from now on: {', '.join(apply[:MOST])}{more}{pool}")
    if stay:
        kept = ", ".join(f"{key} {_short(changes[key][0])}" for key in stay)
        lines.append(f"changed, but stays as the checkpoint has it: {kept}")
    return lines


def _stays(key: str, config: RunConfig) -> bool:
    adapts = config.algorithm.kl.target_kl is not None
    return key == "run.seed" or (key == "algorithm.kl.kl_coef" and adapts)


def _short(value: Any) -> str:
    return "null" if value is None else f"{value!s:.60}"


def _changes(about: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Key -> (value then, value now)."""
    before, now = (
        {".".join(parts): value for parts, value in leaves(values)}
        for values in (about["config"], without_secrets(config))
    )
    keys = [*now, *(key for key in before if key not in now)]
    return {k: (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)}
