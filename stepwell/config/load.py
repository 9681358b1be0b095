"""This module reads a `RunConfig` from a preset or a YAML file and `key=value` overrides, so that
every command takes its configuration the same way and says what is wrong with it.

    a preset  ◄─extends─  mine.yaml  ◄─over it─  key=value …   ──►  RunConfig

Each layer goes over the one before, key by key; lists are replaced whole. A layer that gives a
section another `kind` replaces the section: the keys of the old kind go. Keys that both kinds have
from a section they share (`shuffle` of every data source, every key of an engine) stay.

Owns: where presets are and how layers are merged. Does not own the sections (`config/run.py`) nor
the wording of errors (`config/errors.py`). Loads no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import MarkedYAMLError, YAMLError

from stepwell.backends.config import LORA_RATE
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.hub import WANTED, fetch_model, is_hub_id
from stepwell.backends.remote_files import fetch_folder, is_remote
from stepwell.config.errors import Problem, explain, nearest, told_value
from stepwell.config.keys import (
    ROOT,
    by_kind,
    leaves,
    models_of,
    named_by,
    takes_path,
    types_of,
)
from stepwell.config.run import RunConfig
from stepwell.config.secrets import HIDDEN
from stepwell.datapool.config import at_home
from stepwell.layout import EVAL, RUN_FILE
from stepwell.trainer.config import episodes_of
from stepwell.trainer.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
PRESET_DIRS = (Path("configs"), _PACKAGE / "configs")
"""Folders that `--config NAME` searches: the working folder's, then Stepwell's own."""

MODELS = (
    "model.path",
    "engine.model_path",
    "backend.reference_path",
    "algorithm.critic.path",
)
"""Keys that take a model's folder, its id on the hub, or an address such as s3://bucket/model."""

Raw: TypeAlias = dict[str, Any]
"""Sections as a file has them: plain containers, `${…}` not resolved."""

_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layer:
    """Values that one file or the command line gives."""

    path: Path | None
    """None is the command line."""
    values: Raw
    typed: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Numbers and booleans as they were typed, by key: 1e3, 007, on."""

    def depth(self, parts: Sequence[str]) -> int:
        """Return the number of leading `parts` that this layer sets."""
        value: Any = self.values
        for depth, part in enumerate(parts):
            if not isinstance(value, dict) or part not in value:
                return depth
            value = value[part]
        return len(parts)


def find_config(name: str, beside: Path = Path(), extended_by: Path | None = None) -> Path:
    """The YAML file called `name`: a path from the folder `beside`, or a preset's name.

    Args:
        extended_by: file that is over it; a preset of ours may have its name.

    Raises:
        ConfigError: there is none; with the nearest preset and all of them.
    """
    if (path := beside / at_home(Path(name))).is_file():
        return path
    for folder in PRESET_DIRS:
        preset = folder / f"{name}.yaml"
        if preset.is_file() and not (extended_by and preset.samefile(extended_by)):
            return preset
    if path.is_dir():
        raise ConfigError(f"is {name!r}, a folder; name a YAML file in it")
    known = [path.stem for path in presets()]
    raise ConfigError(
        f"is {name!r}: no such file or preset{nearest(Path(name).stem, known)} "
        f"(presets: {', '.join(known)})"
    )


def presets() -> list[Path]:
    """The files that `--config NAME` finds by name, in alphabetical order."""
    found: dict[str, Path] = {}
    for folder in PRESET_DIRS:
        for path in folder.glob("*.yaml"):
            found.setdefault(path.stem, path)
    return [found[name] for name in sorted(found)]


def presets_and_uses() -> dict[str, str]:
    """Each preset's name, and what its first comment says it is."""

    def about(path: Path) -> str:
        with path.open(encoding="utf-8", errors="replace") as lines:
            first = next(lines, "")
        return first.removeprefix("#").strip() if first.startswith("#") else ""

    return {path.stem: about(path) for path in presets()}


def load_config(
    name: str | None,
    overrides: Sequence[str] = (),
    *,
    here: bool = True,
) -> RunConfig:
    """Read a preset or file and what it extends, apply `key=value` overrides, validate.

    Args:
        name: of the preset or file; None: the overrides are everything.
        here: it is to run here: the model's folder is there, and models that are named by their id
            on the hub are downloaded, unless they are in its cache.

    Raises:
        ConfigError: one line per problem, each naming the key, the value and the remedy.
    """
    path = None if name is None else named_config(name)
    given, lines = _read_overrides(overrides)
    layers = [*(_read_files(path, ()) if path else ()), given]
    merged = _merged(layers)
    model, rollout = merged.get("model"), merged.get("rollout")
    has_model = isinstance(model, dict) and "path" in model
    has_harness = isinstance(rollout, dict) and rollout.get("harness") is not None
    has_harness = has_harness or episodes_of(merged.get("data")) is not None
    beneath = [] if has_model else [_for_the_quickstarts_model(has_harness=has_harness)]
    config = _validated([*beneath, *layers], lines, path, here)
    for layer in beneath:
        _tell_settings(layer, layers)
    _warn_of_rate(layers, config)
    return config


def _tell_settings(beneath: Layer, layers: Sequence[Layer]) -> None:
    """Say which settings of the quickstart hold where no model is named."""
    keys = [
        f"{'.'.join(parts)}={told_value(value)}"
        for parts, value in leaves(beneath.values)
        if parts != ("model", "path") and all(layer.depth(parts) < len(parts) for layer in layers)
    ]
    log.warning(
        "model.path is not set, so the quickstart's model is taken, with its settings where you "
        "set none: %s; set model.path to have the defaults instead",
        ", ".join(keys),
    )


def _warn_of_rate(layers: Sequence[Layer], config: RunConfig) -> None:
    """Warn where `backend.lora` is put over a `backend.lr` that was chosen without it."""

    def setting(*key: str) -> list[int]:
        return [i for i, layer in enumerate(layers) if layer.depth(key) == len(key)]

    rates, adapters = setting("backend", "lr"), setting("backend", "lora")
    if config.backend.lora is not None and rates and rates[-1] < adapters[0]:
        log.warning(
            "backend.lora is set, and backend.lr = %g in %s is a rate of full fine-tuning; "
            "adapters want about ten times that: backend.lr=%g",
            config.backend.lr,
            layers[rates[-1]].path,
            LORA_RATE * config.backend.lr,
        )


def attached_config(
    run_dir: Path,
    values: Raw,
    name: str | None = None,
    overrides: Sequence[str] = (),
    typed_in: Path | None = None,
) -> RunConfig:
    """The configuration of a trainer that is attached to the run in `run_dir`: the run's own, below
    a preset or file and `key=value` overrides of the trainer's keys.

    Args:
        values: the run's resolved configuration, from its `run.json`.
        name: of the preset or file; None: none.
        typed_in: folder of the command, as `_read_overrides`.

    Raises:
        ConfigError: as `load_config`; or a key is given that the run's other parts go by, or a
            secret is not.
    """
    own = _without_keys(values) | {"run": values["run"] | {"dir": str(run_dir), "resume": "auto"}}
    path = run_dir / RUN_FILE
    served = Layer(path, _as_it_is(own))
    given, lines = _read_overrides(overrides, typed_in)
    above = [*([] if name is None else _read_files(named_config(name), ())), given]
    config = _validated([served, *above], lines, path)
    before = _validated([served], [], path)
    # A secret is given again, and nobody can tell whether it is the run's.
    secrets = {name: value for name, value in before.cluster.env.items() if HIDDEN in value}
    cluster = config.cluster.model_copy(update={"env": config.cluster.env | secrets})
    compared = config.model_copy(update={"cluster": cluster})
    for section in RunConfig.model_fields.keys() - TRAINERS_SECTIONS:
        asked, has = getattr(compared, section), getattr(before, section)
        for key in type(has).model_fields:
            if getattr(asked, key) != getattr(has, key) and (section, key) != ("run", "resume"):
                lines.append(
                    f"{section}.{key} is {told_value(getattr(asked, key))}, but the run in "
                    f"{run_dir} goes by {told_value(getattr(has, key))} since it was started; an "
                    f"attached trainer has {', '.join(sorted(TRAINERS_SECTIONS))} of its own"
                )
    if config.sft_share and not before.sft_share:
        lines.append(
            f"sampling.channels gives conversations a share, but the pool of the run in {run_dir} "
            "has no channel for them; start `stepwell serve` with the same sampling.channels"
        )
    lines += _of_its_pool(config, before, run_dir)
    if config.run.resume == "never":
        lines.append(
            "run.resume is 'never', which would remove the pool that agents fill; give it to "
            "`stepwell serve`, or name a step to go back to"
        )
    used: dict[str, Any] = {**dict.fromkeys(TRAINERS_SECTIONS, True), "cluster": {"env"}}
    lines += _hidden(config.model_dump(mode="json", include=used), path)
    if lines:
        raise ConfigError("\n".join(lines))
    _warn_of_rate([served, *above], config)
    return config


def _of_its_pool(config: RunConfig, before: RunConfig, run_dir: Path) -> list[str]:
    """A line for each key of a trainer's that its pool goes by since it was started: with another
    value nothing would hold generation back, or nothing would ever be served.

    Args:
        before: the configuration of the run that has the pool.
    """

    def own(of: RunConfig) -> dict[str, Any]:
        return {
            "async_training.mode": of.async_training.mode,
            "async_training.max_queue_size": of.async_training.max_queue_size,
            "rollout.max_outstanding_groups": of.max_outstanding_groups,
        }

    lines = []
    for (key, asked), has in zip(own(config).items(), own(before).values(), strict=True):
        if asked != has:
            with_agent = " and rollout.agent" if key.startswith("rollout.") else ""
            lines.append(
                f"{key} is {told_value(asked)}, but the pool of the run in {run_dir} goes by "
                f"{told_value(has)}; start `stepwell serve` with the same {key}{with_agent}"
            )
    if before.only_scored and config.rollout.agent is None and not config.only_scored:
        lines.append(
            f"rollout.reward is given, but the pool of the run in {run_dir} leaves out what its "
            "agents have not scored, as it was started without one; start `stepwell serve` with "
            "rollout.reward"
        )
    return lines


def eval_config(
    run_dir: Path,
    values: Raw,
    checkpoint: Path,
    overrides: Sequence[str] = (),
    typed_in: Path | None = None,
) -> RunConfig:
    """The configuration of an evaluation of a run's checkpoint, beside the run, which may be alive:
    the run's own, on free ports of this machine, below `key=value` overrides.

    Args:
        values: the run's resolved configuration, from its `run.json`.
        typed_in: folder of the command, as `_read_overrides`.

    Raises:
        ConfigError: as `load_config`; or a secret is not given again.
    """
    run = values["run"]
    own = _without_keys(values) | {
        "run": run | {"name": f"{run['name']}-eval", "dir": str(run_dir / EVAL)},
        "validation": values["validation"] | {"only": True},
        "pool": values["pool"]
        | {"journal_dir": None, "archive": values["pool"].get("archive", {}) | {"dir": None}},
        "logging": {"wandb": "disabled", "console": "quiet"},
    }
    own["run"]["resume"] = str(checkpoint)
    own["gateway"] |= {"port": 0, "public_url": None}
    own["engine"] = values["engine"] | {"port": 0}
    given, lines = _read_overrides(overrides, typed_in)
    path = run_dir / RUN_FILE
    config = _validated([Layer(path, _as_it_is(own)), given], lines, path)
    if lines := _hidden(config.model_dump(mode="json"), path):
        raise ConfigError("\n".join(lines))
    return config


def recorded_config(run_dir: Path, values: Raw) -> RunConfig:
    """The configuration that a run was started with, less the gateway's keys, to be looked at.

    Args:
        values: the run's resolved configuration, from its `run.json`.

    Raises:
        ConfigError: another release wrote it, with other keys.
    """
    try:
        return RunConfig.model_validate(_without_keys(values), context={"here": False})
    except ValidationError as e:
        path = run_dir / RUN_FILE
        raise ConfigError("\n".join(f"{path}: {p.text}" for p in explain(e, values))) from e


def _without_keys(values: Raw) -> Raw:
    """A run's resolved configuration without the keys of its gateway, which `run.json` hides."""
    gateway = values.get("gateway", {})
    return values | {"gateway": {k: v for k, v in gateway.items() if k not in _GATEWAYS_ALONE}}


TRAINERS_SECTIONS = RunConfig.model_fields.keys() & {
    "rollout",
    "async_training",
    "sampling",
    "algorithm",
    "trainer",
    "validation",
    "data",
    "backend",
    "publish",
    "logging",
}
"""Sections that an attached trainer may have otherwise than the run it is attached to."""
_GATEWAYS_ALONE = ("admin_keys", "agent_keys", "host")
"""Keys of the gateway that `run.json` hides, and what asks for them."""


def _hidden(values: Raw, path: Path) -> list[str]:
    """A line for each of `values` that is, or holds, a secret which `path` hides."""
    keys = [".".join(parts) for parts, value in leaves(values) if HIDDEN in json.dumps(value)]
    return [
        f"{key} is a secret, which {path} does not hold; give it again: {key}=…" for key in keys
    ]


def _as_it_is(value: Any) -> Any:
    """Resolved values such that `_resolve` gives them again: `${…}` in one stands for itself."""
    match value:
        case str():
            return _BEGINS.sub(r"\1\1\\${", value)
        case dict():
            return {key: _as_it_is(inner) for key, inner in value.items()}
        case list():
            return [_as_it_is(item) for item in value]
        case _:
            return value


_BEGINS = re.compile(r"(\\*)\$\{")


def named_config(name: str) -> Path:
    """The YAML file or preset that `--config` names. Raises as `find_config`."""
    try:
        return find_config(name)
    except ConfigError as e:
        raise ConfigError(f"--config {e}") from None


def _validated(
    layers: Sequence[Layer],
    lines: Sequence[str],
    path: Path | None,
    here: bool = True,
) -> RunConfig:
    """The layers over each other, as a configuration.

    Args:
        lines: what is wrong with the command line.
        path: the file that is named where a key stands in none.
    """
    merged = _merged(layers)
    _name(merged, path)
    try:
        raw = _resolve(merged)
        if here and not lines:
            fetch_models(raw)
        config = RunConfig.model_validate(raw, context={"here": here})
    except OmegaConfBaseException as e:
        key = e.full_key or ""
        remedy = "give it a value, or a key from the top, e.g. ${run.name}"
        text = f"{key}: {str(e).splitlines()[0]}; {remedy}"
        problems = [Problem(tuple(key.split(".")), text)]
    except ValidationError as e:
        typed = {key: text for layer in layers for key, text in layer.typed.items()}
        problems = list(explain(e, raw, typed))
    else:
        if not lines:
            return config
        problems = []
    raise ConfigError("\n".join([*lines, *(_with_origin(p, layers, path) for p in problems)]))


def _merged(layers: Sequence[Layer]) -> Raw:
    merged: Raw = {}
    for layer in layers:
        merged = _over(merged, layer.values, ROOT)
    return merged


def _for_the_quickstarts_model(*, has_harness: bool) -> Layer:
    """The quickstart's model and the settings that suit it, without its agent and tasks; a harness
    has times of its own."""
    path = _PACKAGE / "configs" / "quickstart.yaml"
    (layer,) = _read_files(path, ())
    not_taken = {"agent"}
    if has_harness:
        not_taken |= {"timeout_s", "group_deadline_s", "concurrency"}
    rollout = {k: value for k, value in layer.values["rollout"].items() if k not in not_taken}
    values = {key: value for key, value in layer.values.items() if key != "data"}
    return Layer(path, values | {"rollout": rollout})


def _name(values: Raw, path: Path | None) -> None:
    """A run that has no name is called as its file, else as its agent's module."""
    run, rollout = values.setdefault("run", {}), values.get("rollout")
    agent = rollout.get("agent") if isinstance(rollout, dict) else None
    name = path.stem if path else ""
    if not path and isinstance(agent, str):
        file = agent.rpartition(":")[0]
        is_file = file.endswith(".py")
        name = Path(file).stem if is_file else re.split("[:.]", agent)[-2:][0]
    if isinstance(run, dict) and "name" not in run and name:
        run["name"] = named_as(name)


def named_as(text: str) -> str:
    """The nearest name of a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def fetch_models(raw: Raw) -> None:
    """In place of ids on the hub and of addresses, the folders that the models are in.

    Raises:
        ConfigError: one cannot be had.
    """
    for key in MODELS:
        *parents, last = key.split(".")
        section: Any = raw
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(name := section.get(last), str):
            revision = section.get("revision") if key == "model.path" else None
            try:
                if is_remote(name):
                    section[last] = str(fetch_folder(name, WANTED, key))
                elif is_hub_id(name):
                    section[last] = str(fetch_model(name, revision, key))
            except BackendConfigError as e:
                raise ConfigError(str(e)) from e


def _with_origin(problem: Problem, layers: Sequence[Layer], path: Path | None) -> str:
    """The problem's line, after the file it is in; what the command line gives needs none."""
    # The last layer among those that set most of the key is where its value comes from.
    layer = max(reversed(layers), key=lambda layer: layer.depth(problem.parts))
    if not layer.depth(problem.parts):
        return f"{path}: {problem.text}" if path else problem.text
    return problem.text if layer.path is None else f"{layer.path}: {problem.text}"


def _read_files(path: Path, above: tuple[Path, ...]) -> list[Layer]:
    """The file at `path`, after what it extends."""
    if path.resolve() in [p.resolve() for p in above]:
        circle = " extends ".join(map(str, (*above, path)))
        raise ConfigError(f"{circle}: a circle; remove one extends")
    try:
        loaded = OmegaConf.load(path)
        values: Any = OmegaConf.to_container(loaded)
    except MarkedYAMLError as e:
        line = f"line {e.problem_mark.line + 1}: " if e.problem_mark else ""
        raise ConfigError(f"{path}: {line}{e.problem or e.context}{_remedy(path, e)}") from e
    except OmegaConfBaseException as e:
        raise ConfigError(f"{path}: {e.full_key}: {str(e).splitlines()[0]}") from e
    except (OSError, UnicodeError, YAMLError) as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"{path}: {first}; write a mapping of sections") from e
    if not isinstance(values, dict) or not values:
        holds = "a list" if values else "nothing"
        raise ConfigError(f"{path}: holds {holds}; write a mapping of sections")
    values = {str(key): value for key, value in values.items()}
    base = values.pop("extends", None)
    if base is None:
        return [Layer(path, values)]
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: extends is {base!r}; write the name of one preset, or a path from this file"
        )
    try:
        found = find_config(base, path.parent, path)
    except ConfigError as e:
        raise ConfigError(f"{path}: extends {e}") from None
    return [*_read_files(found, (*above, path)), Layer(path, values)]


def _remedy(path: Path, error: MarkedYAMLError) -> str:
    """Remedy of a frequent mistake in YAML, after a semicolon; "" for others."""
    lines = path.read_text().splitlines()
    number = error.problem_mark.line if error.problem_mark else len(lines)
    line = lines[number] if number < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "; indent with spaces: YAML takes no tabs"
    bare = re.search(r"\$\{[^}]*\}?", _QUOTED.sub("", line))
    if bare and "flow" in (error.context or ""):
        return f'; inside {{ }} or [ ] quote it: "{bare[0]}"'
    return ""


def _read_overrides(
    overrides: Sequence[str], typed_in: Path | None = None
) -> tuple[Layer, list[str]]:
    """All overrides as one layer, and a line for each that is none.

    Args:
        typed_in: folder of a command that goes on in the folder of a run; paths that are there are
            made absolute.
    """
    layer: Raw = {}
    typed: dict[tuple[str, ...], str] = {}
    lines = []
    for override in overrides:
        key, sep, value = override.partition("=")
        tidy = ".".join(re.findall(r"[^.\s]+", key.lstrip("-").partition("[")[0]))
        if not sep and _is_configuration(override):
            lines.append(f"override {override!r} is malformed; write --config {override}")
            continue
        if not sep or key != tidy or not key:
            right = f"{tidy or 'KEY'}={value.strip() or 'VALUE'}"
            whole = ", the list as a whole" if "[" in key else ""
            lines.append(f"override {override!r} is malformed; write {right}{whole}")
            continue
        if key == "extends":
            lines.append(
                f"override {override!r}: extends is given in a file; name that by --config"
            )
            continue
        try:
            given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        except UnicodeError:  # the name of an old file, mostly
            lines.append(f"override {override!r} is no UTF-8; rename what it names")
            continue
        except (OmegaConfBaseException, YAMLError) as e:
            lines.append(
                f"override {override!r} is not understood: {str(e).splitlines()[0]}; close what is "
                "open, and put text with brackets, colons or ${…} in quotes"
            )
            continue
        if "#" in value and _ends_in_comment(value, given):
            lines.append(
                f"override {override!r} holds a comment: YAML leaves out # after a space, and all "
                "behind it; put the value in quotes"
            )
            continue
        nested: Any = given["value"]
        parts = key.split(".")
        typed.pop(tuple(parts), None)
        if isinstance(nested, int | float):
            typed[tuple(parts)] = value.strip()
        for part in reversed(parts):
            nested = {part: nested}
        layer = _over(layer, nested, ROOT, one_layer=True)
    if typed_in is not None:
        layer = _from_folder(typed_in, layer, ROOT)
    return Layer(None, layer, typed), lines


def _is_configuration(word: str) -> bool:
    """True for what `--config` was forgotten before."""
    is_file = word.endswith((".yaml", ".yml")) or os.path.isfile(word)
    return is_file or any(path.stem == word for path in presets())


def _ends_in_comment(value: str, given: object) -> bool:
    """True if YAML gives the same for more text behind `value`."""
    with suppress(OmegaConfBaseException, YAMLError):
        return bool(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}x"])) == given)
    return False


def _from_folder(folder: Path, value: Any, types: Sequence[Any], *, is_path: bool = False) -> Any:
    """`value`, of `types`, with the paths that are in `folder` absolute; also those of files that a
    function or class is named in (`reward.py:score`)."""
    if isinstance(value, dict):
        found = value.copy() if isinstance(value, _Whole) else {}
        for key, inner in value.items():
            named = takes_path(types, value, key)
            inner_types = types_of(types, value, key)
            found[key] = _from_folder(folder, inner, inner_types, is_path=named)
        return found
    if isinstance(value, list):
        return [_from_folder(folder, item, types, is_path=is_path) for item in value]
    if not isinstance(value, str):
        return value
    path, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    is_there = path and (colon or is_path) and glob(path, root_dir=folder)
    return f"{folder / path}{colon}{name}" if is_there else value


class _Whole(dict[str, Any]):
    """A section that text alone stood for, with what its layer says besides: nothing stays of what
    is beneath, no key of another function, source or preset."""


def _over(below: Any, above: Any, types: Sequence[Any], *, one_layer: bool = False) -> Any:
    """`above` over `below`, both values of `types`. Within one layer a new kind drops nothing."""
    if isinstance(above, str) and "${" not in above:
        sections = models_of(types, above)
        if name := next(filter(None, map(named_by, sections)), None):
            above = _Whole({name: above})
        elif spelled_out := next(filter(None, map(by_kind, sections)), None):
            above = spelled_out(above)
    if not isinstance(above, dict):
        return above
    if not isinstance(below, dict) or (isinstance(above, _Whole) and not one_layer):
        below = {}
    if not one_layer:
        below = _of_new_kind(below, above, types)
    values: Raw = {**below, **above}
    if one_layer and (isinstance(above, _Whole) or isinstance(below, _Whole)):
        values = _Whole(values)
    for key, value in above.items():
        inner = types_of(types, values, key)
        values[key] = _over(below.get(key), value, inner, one_layer=one_layer)
    return values


def _of_new_kind(below: Raw, above: Raw, types: Sequence[Any]) -> Raw:
    """Return the part of `below` that stays when `above` chooses the kind. The same kind keeps all;
    another kind keeps the fields that both inherit from one section, which mean the same."""
    if "kind" not in above or "kind" not in below or above["kind"] == below["kind"]:
        return below
    old, new = models_of(types, below), models_of(types, above)
    if len(old) != 1 or len(new) != 1:
        return below  # an unknown kind: the error will be about that
    return {
        key: value
        for key, value in below.items()
        if key in old[0].model_fields
        and key in new[0].model_fields
        and _owner(old[0], key) is _owner(new[0], key)
    }


def _owner(model: type[BaseModel], key: str) -> type[BaseModel]:
    """The section that defines the field `key` of `model`: itself, or what it inherits from."""
    bases = [b for b in model.__mro__ if issubclass(b, BaseModel) and key in b.model_fields]
    return bases[-1]


def _resolve(values: Raw) -> Raw:
    """`values` with every `${…}` replaced.

    Raises:
        OmegaConfBaseException: a name leads nowhere.
    """
    # ${stepwell.dir}/quickstart/model came with Stepwell, wherever the command is run.
    came_with = {"stepwell": values.get("stepwell", {"dir": str(_PACKAGE)})}
    tree = OmegaConf.create(values | came_with)
    raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    return {key: value for key, value in raw.items() if key in values}
