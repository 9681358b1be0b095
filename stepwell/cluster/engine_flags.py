"""Options of SGLang and vLLM that follow from the run's own keys: no number stands in two places.

    cluster.gpus_per_engine=4       --tp-size 4 · vLLM: --tensor-parallel-size 4
    engine.weight_transport=lora    --enable-lora --max-lora-rank R --lora-target-modules …
    trainer and engine on one GPU   --mem-fraction-static 0.4 · vLLM: --gpu-memory-utilization 0.4

An option that `engine.extra_args` has is left to it. Pure. Does not own the options that every
engine gets (`backends/engines/commands.py`, `sglang.py`).
"""

from __future__ import annotations

from contextlib import suppress

from stepwell.backends.config import EngineConfig, LoraConfig
from stepwell.backends.hub import is_hub_id
from stepwell.config.run import RunConfig
from stepwell.trainer.errors import ConfigError

SHARED_MEMORY = 0.4
"""Share of a GPU's memory for an engine's weights and KV cache, where a trainer's rank has the
rest: its weights, gradients, optimizer state and activations need more than half."""
OWN_MEMORY = 0.85
"""About what SGLang and vLLM take of a GPU of their own by themselves."""
_SPLITS = (
    "--tp-size",
    "--tensor-parallel-size",
    "--tp",
    "--pp-size",
    "--pipeline-parallel-size",
    "--pp",
    "-tp",
    "-pp",
    "--ep-size",
    "--expert-parallel-size",
    "--ep",
    "--dp-size",
    "--data-parallel-size",
    "--dp",
)
"""Names for how a model is split; one that is given says it all."""


def engine_of_run(config: RunConfig, is_colocated: bool) -> EngineConfig:
    """The engine's section as its processes get it, with the options that follow from the run's
    keys. Raises as `flags_of_run`."""
    engine, flags = config.engine, flags_of_run(config, is_colocated)
    path = engine.model_path
    if path is not None and not is_hub_id(path):
        path = path.absolute()
    return engine.model_copy(
        update={"model_path": path, "extra_args": (*flags, *engine.extra_args)}
    )


def flags_of_run(config: RunConfig, is_colocated: bool) -> tuple[str, ...]:
    """Options of each SGLang or vLLM server that the run starts; other engines get none.

    Args:
        is_colocated: a trainer's rank is on the same GPU.

    Raises:
        ConfigError: `backend.lora.target_modules` says the modules in a form that SGLang cannot
            read.
    """
    if config.engine.kind not in ("sglang", "vllm") or config.engine.is_attached:
        return ()
    given = {flag.partition("=")[0] for flag in config.engine.extra_args}
    flags: list[str] = []
    is_vllm = config.engine.kind == "vllm"

    def add(name: str, *values: str) -> None:
        if name not in given:
            flags.extend((name, *values))

    if config.cluster.gpus_per_engine > 1 and not given & set(_SPLITS):
        add(
            "--tensor-parallel-size" if is_vllm else "--tp-size",
            str(config.cluster.gpus_per_engine),
        )
    lora = _adapters(config) if config.engine.weight_transport == "lora" else None
    if lora is not None:
        add("--enable-lora")
        add("--max-lora-rank", str(lora.rank))
        if "--lora-target-modules" not in given:
            add("--lora-target-modules", *_modules(lora.target_modules))
    if is_colocated:
        add("--gpu-memory-utilization" if is_vllm else "--mem-fraction-static", str(SHARED_MEMORY))
    return tuple(flags)


def engine_share(config: RunConfig, is_colocated: bool = True) -> float:
    """Share of a GPU's memory that an engine takes: what `engine.extra_args` says, else beside a
    trainer's rank `SHARED_MEMORY` and on a GPU of its own `OWN_MEMORY`.

    Raises:
        ConfigError: `engine.extra_args` says no share.
    """
    given = [part for flag in config.engine.extra_args for part in flag.split("=", 1)]
    for name in ("--mem-fraction-static", "--gpu-memory-utilization"):
        if name in given[:-1]:
            text = given[given.index(name) + 1]
            with suppress(ValueError):
                if 0 < (share := float(text)) <= 1:
                    return share
            raise ConfigError(
                f"engine.extra_args: {name} is {text!r}; give the engine's share of a GPU's "
                "memory, above 0 and at most 1"
            )
    return SHARED_MEMORY if is_colocated else OWN_MEMORY


def _adapters(config: RunConfig) -> LoraConfig | None:
    """Adapters that the run trains."""
    if config.trainer.backend == "torch":
        return config.backend.lora
    from stepwell.backends.base import BACKENDS

    return BACKENDS.load(config.trainer.backend).adapters(config.backend)


def _modules(target: str | tuple[str, ...]) -> tuple[str, ...]:
    if target == "all-linear":
        return ("all",)
    if isinstance(target, str):
        raise ConfigError(
            f"backend.lora.target_modules is {target!r}, a pattern, which SGLang does not take; "
            "list the modules, or say in engine.extra_args which they are: [--lora-target-modules, "
            "q_proj, …]"
        )
    return target
