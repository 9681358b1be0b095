"""Launch line of a real SGLang server, with GPUs and on a machine without one.

    command(EngineConfig(kind="sglang", model_path="/models/base"), Launch(31000, "/weights/v7"))
    with GPUs     python -m sglang.launch_server --model-path /weights/v7 … + extra_args
    without one   the same + `CPU_FLAGS`, and `sglang_cpu/` on its PYTHONPATH

Interpreter: `engine.python`; else this one if it has SGLang; else `.venv-sglang/bin/python`, in the
working folder or the source checkout, which `make install-sglang` builds. SGLang pins its own torch
and transformers, so an environment of its own is the usual case.

Tested against SGLang 0.5.23 by `make test-sglang`. Owns the flags. Does not own running the process
(`supervisor.py`).
"""

from __future__ import annotations

from pathlib import Path

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import (
    CommandLine,
    Launch,
    common_flags,
    interpreter,
)

_HERE = Path(__file__).resolve().parent

CPU_MAX_TOTAL_TOKENS = 32_768
"""Tokens of KV cache without a GPU: 128 rollouts of 256. `engine.extra_args` may say otherwise."""

CPU_FLAGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",  # its scheduler polls: idle, it would hold a core
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    str(CPU_MAX_TOTAL_TOKENS),
)
"""The torch path of a dense model: no kernel package is called."""

MEMORY_FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""Flags that let SGLang lend its memory and come back with its weights."""

CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A server whose scheduler crashed waits a minute for the dump before it ends.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONPATH": str(_HERE / "sglang_cpu"),
}


def command(config: EngineConfig, launch: Launch) -> CommandLine:
    """A real SGLang server, with GPUs or without.

    Raises:
        EngineStartError: no interpreter here has SGLang; the message says how to get one.
    """
    on_cpu = launch.on_cpu
    if on_cpu and config.dtype == "auto":  # SGLang's own `auto` turns float32 into float16
        config = config.model_copy(update={"dtype": "float32"})
    python = interpreter(config, "sglang", "pip install 'sglang>=0.5.23'")
    argv = [str(python), "-m", "sglang.launch_server", *common_flags(config, launch)]
    # A line per request in the log would push out what an error shows of it.
    argv += ["--random-seed", str(config.seed), "--log-level-http", "warning"]
    if on_cpu:
        argv += CPU_FLAGS
    elif config.release_memory:  # without a GPU the endpoints are there and free nothing
        argv += MEMORY_FLAGS
    return CommandLine([*argv, *launch.extra_args, *config.extra_args], CPU_ENV if on_cpu else {})
