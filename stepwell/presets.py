"""This module reads a `RunConfig` from a preset or a YAML file and `key=value` overrides.

Owns: where presets are, the order of layers (file < overrides) and the wording of every
configuration error. Does not own the sections (`config.py`). Loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from stepwell.config import RunConfig
from stepwell.trainer.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
PRESET_DIRS = (Path("configs"), _PACKAGE / "configs")
"""Where `--config NAME` looks: the working folder, then what came with Stepwell."""


def find_config(name: str) -> Path:
    """The YAML file for `--config NAME` (a path, or a preset's name without `.yaml`)."""
    if Path(name).is_file():
        return Path(name)
    for folder in PRESET_DIRS:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = sorted({p.stem for folder in PRESET_DIRS for p in folder.glob("*.yaml")})
    hint = f"; did you mean {close[0]!r}?" if (close := _nearest(name, known)) else ""
    raise ConfigError(
        f"--config is {name!r}: no such file or preset{hint} (presets: {', '.join(known)})"
    )


def load_config(name: str, overrides: Sequence[str] = (), *, paths_exist: bool = True) -> RunConfig:
    """Read a preset or file, apply `key=value` overrides, validate.

    Args:
        paths_exist: the model is here; False to look at a configuration for another machine.

    Raises:
        ConfigError: one line per problem, each naming the key, the value and the remedy.
    """
    path = find_config(name)
    try:
        base = OmegaConf.load(path)
        if not isinstance(base, DictConfig):
            raise ConfigError(f"{path}: holds a {type(base).__name__}; write a mapping of sections")
        for override in overrides:
            key, sep, _ = override.partition("=")
            if not sep or not key:
                raise ConfigError(
                    f"override {override!r} is not KEY=VALUE, e.g. trainer.total_steps=5"
                )
        # `engine=sglang` chooses the kind and keeps the section's other keys.
        keyed = [f"engine.kind{o[6:]}" if o.startswith("engine=") else o for o in overrides]
        # ${stepwell.dir}/quickstart/model came with Stepwell, wherever the command is run.
        came_with = {"stepwell": {"dir": str(_PACKAGE)}}
        merged = OmegaConf.merge(came_with, base, OmegaConf.from_dotlist(keyed))
        raw: Any = OmegaConf.to_container(merged, resolve=True)
        raw.pop("stepwell")
    except (OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(f"{path}: {str(e).splitlines()[0]}") from e
    try:
        return RunConfig.model_validate(raw, context={"paths_exist": paths_exist})
    except ValidationError as e:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _explain(e))) from None


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        parts, known = _locate(problem["loc"])
        key = ".".join(parts)
        if problem["type"] == "extra_forbidden":
            close = _nearest(parts[-1], known)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            yield f"{key} is not a known key; {hint}"
        elif problem["type"] == "missing":
            yield f"{key} is missing; add it"
        elif problem["type"] == "union_tag_invalid":
            context = problem["ctx"]
            tag = context["discriminator"].strip("'")
            yield f"{key}.{tag} is {context['tag']!r}; it should be {context['expected_tags']}"
        elif problem["type"] == "value_error":
            yield f"{key + ': ' if key else ''}{problem['ctx']['error']}"
        else:
            message = problem["msg"].removeprefix("Input should be ")
            if problem["type"] in ("tuple_type", "list_type"):
                message = "a list, [a, b, …]"
            yield f"{key} is {problem['input']!r:.80}; it should be {message}"


def _locate(location: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """The key as the file spells it, and the keys known beside it. pydantic puts the tag of a
    tagged union into the location (data.train.reasoning_gym.size); the file has no such key."""
    parts: list[str] = []
    known = list(RunConfig.model_fields)
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in map(str, location):
        tagged = [m for m in candidates if part in _tags(m)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            known = list(tagged[0].model_fields)
            continue
        parts.append(part)
        fields = {name: f for m in candidates for name, f in m.model_fields.items()}
        known = list(fields)
        candidates = _models_in(fields[part].annotation) if part in fields else []
    return parts, known


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    kind = model.model_fields.get("kind")
    return getattr(kind.annotation, "__args__", ()) if kind is not None else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in getattr(annotation, "__args__", ()) for m in _models_in(inner)]


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.5)
