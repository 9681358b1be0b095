"""Configuration section `engine`. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stepwell.backends.registry import ENGINES

PauseMode = Literal["abort", "retract", "in_place"]
PublishMode = Literal["abort", "retract", "in_place", "drain"]
WeightTransport = Literal["disk", "disk_delta", "tensor", "distributed", "lora"]


class EngineConfig(BaseModel):
    """One inference engine: launched and supervised (`embedded`, `sglang`), or already running
    elsewhere (`attach`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = "embedded"
    """`embedded`: Stepwell's own server over transformers, for a laptop. `sglang`: a real SGLang
    server. `attach`: servers at `urls` that somebody else runs. Or what an installed package adds
    (`stepwell backends` lists all)."""
    model_path: Path | None = None
    """Hugging Face directory that it starts from; needed unless `kind` is `attach`."""
    tokenizer_path: Path | None = None
    """Where its tokenizer is; null = `model_path`."""
    urls: tuple[str, ...] = ()
    """Base urls of running servers, for `kind: attach`."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one. A restarted engine keeps its port."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine's process. Engine and trainer should not share cores."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests decoded together; more of them wait."""
    context_length: int | None = Field(default=None, ge=2)
    """Longest prompt + response in tokens; null = what the model was made for."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: as in the checkpoint."""
    tool_call_parser: str | None = "qwen25"
    """Default of `/parse_function_call`; null = the tokenizer's own response template."""
    reasoning_parser: str | None = "qwen3"
    """Default of `/separate_reasoning`."""
    stream_interval: int = Field(default=4, ge=1)
    """Tokens between two streamed chunks. Every chunk repeats all before it and costs CPU: with 64
    streams on two busy cores, 1 took 12-47 % of the embedded engine's throughput, 4 at most 13 %.
    The first and the last token are sent at once whatever it is."""
    seed: int = Field(default=0, ge=0)
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """From launch to the first answer of `/health`, loading included."""
    stop_timeout_s: float = Field(default=5.0, gt=0)
    """From SIGTERM to SIGKILL when it is stopped."""
    hang_timeout_s: float = Field(default=120.0, gt=0)
    """An engine that is up and answers no request for so long is restarted; not one that is
    paused or loads weights. Longer than its longest step on a busy machine."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row after a crash or a hang; a minute of health starts the count anew."""
    python: str | None = None
    """Interpreter to run it with, e.g. of SGLang's own environment; null = this one."""
    extra_args: tuple[str, ...] = ()
    """Appended to its command line as they are."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to its environment."""
    weight_transport: WeightTransport = "disk"
    """How new weights get to it. `disk`: it reads the version's directory. `disk_delta`: only the
    tensors that changed. `tensor`: in the body of a request, by value. `distributed`: broadcast in
    a process group, NCCL to GPUs, gloo to CPUs. `lora`: only the adapter, which needs
    `backend.lora`; SGLang must be launched for it (`extra_args`: `--enable-lora --max-lora-rank R
    --lora-target-modules …`). Every version is also written to disk: a crashed engine restarts
    from there."""
    router: str = "none"
    """What the gateway generates through: `none`, each engine directly, which keeps a trajectory on
    one; `launch`: an SGLang router that this run starts; or the url of a running one. Weights and
    pauses go to the engines in any case."""
    release_memory: bool = False
    """Engines give the memory of weights and KV cache up while the trainer computes, so that both
    fit on the same GPUs; nothing is generated meanwhile. A launched SGLang server keeps its weights
    in the host's memory then (`--enable-memory-saver --enable-weights-cpu-backup`)."""

    @field_validator("router")
    @classmethod
    def _router_is_known(cls, router: str) -> str:
        if router in ("none", "launch") or router.startswith(("http://", "https://")):
            return router.rstrip("/")
        raise ValueError(f"router is {router!r}; use none, launch or the url http://host:port")

    @field_validator("kind")
    @classmethod
    def _registered(cls, kind: str) -> str:
        return ENGINES.check(kind)

    @model_validator(mode="after")
    def _source_fits_kind(self) -> EngineConfig:
        if self.kind == "attach" and not self.urls:
            raise ValueError("kind is 'attach' but urls is empty; list the servers' base urls")
        if self.kind != "attach" and self.urls:
            raise ValueError(f"urls is set but kind is {self.kind!r}; set kind to 'attach'")
        if self.kind != "attach" and self.model_path is None:
            raise ValueError(f"model_path is not set; kind {self.kind!r} needs one to start from")
        return self
