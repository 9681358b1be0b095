"""This module loads the rollout generators that `/start_rollout` may run, so that slime's generator
modules work here as they are (THUDM/slime, slime_plugins/rollout_buffer/README.md)::

    TASK_TYPE = "my_task"                                  what /start_rollout names
    def run_rollout(data): …                               makes rollouts, writes them, returns
    def is_valid_group(group, min_size, task_type): …      optional: may this group be served?
    def transform_group(group, task_type): …               optional: its items, as they are served
    def get_group_data_meta_info(groups): …                optional: `meta_info` of an answer
    def check_rollout(data): …                             optional: raises if `data` is no good

A `group` is (instance_id, [item…]). `run_rollout` runs in a process of its own (`process.py`), the
others in the gateway. Only what `gateway.rollout_generators` names is ever loaded: who may start a
rollout chooses among them, and cannot bring code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.datapool.dotted import resolve
from stepwell.datapool.own_loop import ENDS
from stepwell.gateway.errors import GatewayConfigError, GatewayError, RequestError

EXTERNAL = "external"
"""The task type with which nothing runs: agents bring their rollouts by themselves."""
KEY = "STEPWELL_GATEWAY_KEY"
"""Environment variable of a generator's process: the key with which it was started."""
BUILT_IN = dict.fromkeys(("chat", "math"), "stepwell.gateway.slime_buffer.chat")
"""Module by task type; `math` is slime's default. A configured one goes before it."""


FORMER = ("normalize_group_data", "pad_group_data", "filter_item")
"""Functions of a generator that `transform_group` has replaced."""


class GeneratorError(GatewayError, RuntimeError, code="rollout_generator_failed"):
    """A rollout generator failed, or one of its functions."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator module; None where it leaves a function out."""

    path: str
    """Dotted, or of a file."""
    run_rollout: Callable[[dict[str, Any]], Any]
    is_valid_group: Callable[..., Any] | None = None
    transform_group: Callable[..., Any] | None = None
    get_group_data_meta_info: Callable[..., Any] | None = None
    check_rollout: Callable[..., Any] | None = None

    @property
    def is_built_in(self) -> bool:
        return self.path in BUILT_IN.values()

    def check(self, payload: dict[str, Any]) -> None:
        """
        Raises:
            RequestError: `check_rollout` refuses the payload.
        """
        if self.check_rollout is None:
            return
        try:
            self.check_rollout(payload)
        except RequestError:
            raise
        except ENDS:
            raise
        except BaseException as e:  # foreign code
            raise RequestError(
                f"the rollout generator {self.path} refuses this start, and nothing was started: "
                f"{e!s:.500}",
                None,
            ) from e

    def call(self, name: str, *args: Any) -> Any:
        """Call the optional function `name` in the caller's thread, and return its result.

        Raises:
            GeneratorError: it failed.
        """
        try:
            return getattr(self, name)(*args)
        except ENDS:
            raise
        except BaseException as e:  # foreign code
            raise GeneratorError(
                f"{name} of the rollout generator {self.path} failed "
                f"({type(e).__name__}: {e!s:.200})"
            ) from e


def load_generator(path: str) -> tuple[str, Generator]:
    """The task type and the functions of the module `path`.

    Raises:
        ImportError: it is no generator, or cannot be imported.
    """
    module = sys.modules[resolve(f"{path}:__name__")]
    task_type, run = (getattr(module, name, None) for name in ("TASK_TYPE", "run_rollout"))
    if not isinstance(task_type, str) or not callable(run):
        raise ImportError("it has no TASK_TYPE (a string) and run_rollout (a function)")
    former = [name for name in FORMER if hasattr(module, name)]
    if former and not hasattr(module, "transform_group"):
        raise ImportError(
            f"it has {former[0]}, which slime called until July 2025 and calls no more; call it in "
            "transform_group(group, task_type)"
        )
    names = ("is_valid_group", "transform_group", "get_group_data_meta_info", "check_rollout")
    return task_type, Generator(path, run, *(getattr(module, name, None) for name in names))


def load_generators(paths: Sequence[str]) -> dict[str, Generator]:
    """Load the generators of `gateway.rollout_generators`, by task type.

    Raises:
        GatewayConfigError
    """
    found: dict[str, Generator] = {}
    for path in paths:
        try:
            task_type, generator = load_generator(path)
        except Exception as e:  # importing foreign code may raise anything
            raise GatewayConfigError(
                f"gateway.rollout_generators holds {path!r}, which cannot be loaded "
                f"({type(e).__name__}: {e!s:.200}); name a module or a .py file with TASK_TYPE and "
                "run_rollout(data)"
            ) from e
        if task_type in found or task_type == EXTERNAL:
            taken = found[task_type].path if task_type in found else "agents from outside"
            raise GatewayConfigError(
                f"gateway.rollout_generators holds {path!r}, whose TASK_TYPE {task_type!r} is that "
                f"of {taken}; give it one of its own"
            )
        found[task_type] = generator
    return found


def chosen(generators: Mapping[str, Generator], task_type: Any) -> Generator | None:
    """The generator of a task type, or of a path; None for `EXTERNAL`.

    Raises:
        RequestError: there is none.
    """
    if task_type == EXTERNAL:
        return None
    if isinstance(task_type, str):
        by_path = {generator.path: generator for generator in generators.values()}
        if (found := generators.get(task_type) or by_path.get(task_type)) is not None:
            return found
        if task_type in BUILT_IN:
            return load_generator(BUILT_IN[task_type])[1]
    there = ", ".join(sorted({*generators, *BUILT_IN}))
    raise RequestError(
        f"task_type is {task_type!r:.80}, for which there is no rollout generator, and nothing was "
        f"started. There are {there}, and {EXTERNAL} for agents that bring "
        "their rollouts by themselves; name a module of your own in gateway.rollout_generators",
        "task_type",
    )
