"""The sections `engine`, `backend` (torch's) and `algorithm.critic`, and verl's options.

Each key stands with its type, bound and meaning. Names of plug-ins (`engine.kind`) are text here;
`RunConfig` asks the registry. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from stepwell.datapool.config import Section, TextPath

PauseMode = Literal["abort", "retract", "in_place"]
PublishMode = Literal["abort", "retract", "in_place", "drain"]
WeightTransport = Literal["disk", "delta", "nccl", "ipc", "lora"]
ValueAggregation = Literal["token-mean", "sequence-mean-token-mean", "trajectory-mean"]
MAX_SEED = 2**32 - 1
"""The largest seed that numpy takes."""


def plain_url(option: str, url: str, remedy: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ValueError: it is none, or holds a name or a password; the message has `remedy`.
    """
    if "@" in url.partition("?")[0]:
        raise ValueError(
            f"{option} holds a URL with a user name or password, which logs and statistics would "
            "show; leave it out and let engines listen where only the gateway can reach them"
        )
    if not url.startswith(("http://", "https://")) or not _has_place(url):
        raise ValueError(f"{option} is {url!r}; {remedy}")
    return url.rstrip("/")


def _has_place(url: str) -> bool:
    """True if `url` names a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class EngineConfig(Section):
    """One inference engine: launched and supervised (`embedded`, `sglang`, `vllm`), or already
    running elsewhere (`attach`, or another kind with `urls`)."""

    kind: str = "embedded"
    """`embedded`: Stepwell's own server over transformers, for a laptop. `sglang`, `vllm`: a real
    server of that name. `attach`: servers at `urls` that speak SGLang's API and that somebody else
    runs; for running vLLM servers, `vllm` with `urls`; for NVIDIA Dynamo's workers, `dynamo`. Or
    what an installed package adds (`stepwell backends` lists all), or a dotted path
    `module:Name`."""
    model_path: Path | None = None
    """Hugging Face directory that it starts from, unless `kind` is `attach`; default
    `model.path`."""
    urls: tuple[str, ...] = ()
    """Base urls of running servers, for `kind: attach`, `vllm`, `dynamo` or an added one."""
    router_url: str | None = None
    """Base url of a running SGLang router, for `kind: attach` in place of `urls`: its workers are
    asked for at the start. Weights go to each of them, and calls to the one that the gateway
    chooses; the router itself is not called."""
    host: str = "127.0.0.1"
    """Address it listens on; on several nodes the run chooses one that the others reach."""
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
    stream_interval: int = Field(default=4, ge=1)
    """Tokens between two streamed chunks. Every chunk repeats all before it and costs CPU: with 64
    streams on two busy cores, 1 took 12-47 % of the embedded engine's throughput, 4 at most 13 %.
    The first and the last token are sent at once whatever it is."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Sampling seed of requests that bring none; the run's engine i adds i. Default `run.seed`."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """From launch to the first answer of `/health`, loading included."""
    hang_timeout_s: float = Field(default=120.0, gt=0)
    """An engine that is up and answers no request for so long is restarted; not one that is
    paused or loads weights. Longer than its longest step on a busy machine."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row after a crash or a hang; a minute of health starts the count anew."""
    python: TextPath | None = None
    """Interpreter to run it with, e.g. of SGLang's own environment; null = this one, or that of
    `.venv-sglang` or `.venv-vllm`."""
    extra_args: tuple[str, ...] = ()
    """Appended to its command line as they are."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to its environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of `dynamo` (`frontend`), or of an engine that an installed package adds: the keys of
    its own `options` model."""
    weight_transport: WeightTransport = "disk"
    """Transport of new weights to the engine. `disk`: it reads the version's directory. `delta`: it
    reads the tensors that changed since the version that it has. `nccl`: rank 0 broadcasts them,
    NCCL to GPUs, gloo to CPUs; where engines share GPUs with ranks, of which NCCL takes one process
    each, `disk` is used. `ipc`: engines on rank 0's machine take them from memory that they share;
    needs the same torch in both interpreters, else `nccl` is used. `lora`: only the adapter, which
    needs `backend.lora`, or a backend that trains adapters; SGLang is launched for it
    (`--enable-lora --max-lora-rank R --lora-target-modules …`); a publication cuts what runs, and
    the gateway resumes it, whatever `async_training.partial_rollout` is. Every version is also
    written to disk: a crashed engine restarts from there, and all engines read it if a broadcast
    fails."""
    weight_bucket_mb: int = Field(default=512, ge=1)
    """Weights that `nccl` and `ipc` send at once, in MB: each process holds one such buffer. A
    larger tensor goes alone."""
    release_memory: bool = False
    """Engines give the memory of weights and KV cache up while the trainer computes, so that both
    fit on the same GPUs; nothing is generated meanwhile. A launched SGLang server keeps its weights
    in the host's memory then (`--enable-memory-saver --enable-weights-cpu-backup`)."""

    @field_validator("urls")
    @classmethod
    def _urls_are_plain(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(plain_url("urls", url, "write http://host:port") for url in urls)

    @field_validator("router_url")
    @classmethod
    def _router_url_is_plain(cls, url: str | None) -> str | None:
        return None if url is None else plain_url("router_url", url, "write http://host:port")

    @property
    def is_attached(self) -> bool:
        """True: somebody else runs the engines."""
        return bool(self.urls or self.router_url)

    @model_validator(mode="after")
    def _source_fits_kind(self) -> EngineConfig:
        given = [name for name in ("urls", "router_url") if getattr(self, name)]
        if self.kind == "attach" and not given:
            raise ValueError(
                "kind is 'attach' but urls is empty; list the servers' base urls, or set "
                "router_url to the SGLang router before them"
            )
        if len(given) > 1:
            raise ValueError(
                f"router_url is {self.router_url!r}, and urls names engines, too; leave one out"
            )
        speaks_sglang = self.kind in ("embedded", "sglang")
        if given and (speaks_sglang or (self.kind != "attach" and self.router_url)):
            raise ValueError(f"{given[0]} is set but kind is {self.kind!r}; set kind to 'attach'")
        return self


OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "adamw_8bit": ("betas", "eps"),
    "adafactor": (),
    "sgd": ("momentum",),
}
"""Options that only some optimizers have, by optimizer."""


Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]

FULL_LR = 1e-6
"""Rate of full fine-tuning where none is set."""
LORA_RATE = 10
"""Rate of adapters in rates of full fine-tuning."""


class LoraConfig(Section):
    """Low-rank adapters (`backends/torch/lora.py`) instead of training every weight.

    Adapters want about ten times the rate of full fine-tuning: without `backend.lr` they get it.
    The quickstart after 40 optimizer steps, seeds 0 and 1 (full fine-tuning at 1e-4: 0.98, 0.97)::

        rank 16, lr 1e-4   0.89  0.88     the rate of full fine-tuning: too slow
        rank 16, lr 1e-3   0.98  0.92     ten times that
        rank 16, lr 1e-2   0.00           |sBA|/|W| of 1.5: the model is lost
    """

    rank: int = Field(default=16, ge=1)
    """Width r of the update B·A."""
    alpha: int = Field(default=32, ge=1)
    """The update is scaled by alpha / rank (by alpha / √rank with `rslora`)."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """peft's: the ends of module names, one regular expression over whole names, or `all-linear`
    (every linear layer but the LM head). Of a mixture of experts name the attention's layers: an
    adapter on experts is refused."""
    rslora: bool = False
    """Rank-stabilised scaling, arXiv:2312.03732."""


class TorchBackendConfig(Section):
    """Training of the model by `backends/torch/backend.py`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes cuda when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute and saved weights; `auto`: bfloat16 on CUDA, float32 on the CPU. Master weights and
    optimizer state are float32 either way."""
    attention: str = "sdpa"
    """transformers' `attn_implementation`."""
    rows: Literal["step", "merged", "tree"] = "merged"
    """`step`: a row for each step; `merged`: steps whose prompt extends an earlier step share its
    row; `tree`: rows share what they begin with, the prompt of a group above all. Same loss and
    gradient, fewer tokens. `tree` brings its own attention in place of `attention`, and refuses a
    model that cannot take it when the model is loaded."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per forward pass (of each rank); bounds activation memory. A longer row goes
    alone."""
    gradient_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Keep only each layer's input and compute the layer again in the backward pass: activations
    of one layer at a time for a third more compute. `selective` also keeps what attention puts
    out, whose cost grows with the square of a row. `auto`: on CUDA only."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each layer (`torch.compile`), for rows of any length: the first steps take minutes.
    `auto`: on CUDA only."""
    logits_mb: int = Field(default=256, ge=1)
    """float32 logits that exist at once, in MB. Beyond it the LM head goes over the response
    positions in chunks and again in the backward pass (`backends/torch/chunked_head.py`)."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """`adamw_8bit`: bitsandbytes, moments in a quarter of the memory; `adafactor`: factored second
    moments, no first (arXiv:1804.04235), `lr` is relative to each tensor's RMS; `sgd`: no
    state at all without `momentum`."""
    lr: float = Field(default=FULL_LR, gt=0)
    """Learning rate after the warm-up. Unless it is set, `lora` makes it ten times the default."""
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the rate after the warm-up. `linear` and `cosine` fall to `min_lr_ratio` × `lr`
    at `scheduler_steps` and stay there."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly to `lr`."""
    scheduler_steps: int | None = Field(default=None, ge=1)
    """Updates until the rate has decayed, warm-up included, e.g. ${trainer.total_steps}; needed
    by `linear` and `cosine`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final rate of `linear` and `cosine`, in units of `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of Adam's two moments (`adamw`, `adamw_8bit`)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to Adam's denominator."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of `sgd`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices only, norms and biases never decay. Decoupled (AdamW), but for `sgd`, which adds
    it to the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    lora: LoraConfig | None = None
    """Train adapters only; null trains every weight. Engines get merged weights either way."""
    reference_path: Path | None = None
    """Hugging Face directory of the reference policy of a KL term; null = the model that the run
    started from, which under LoRA costs nothing: the model with its adapters off."""
    ranks: int = Field(default=1, ge=1)
    """Processes that shard weights, gradients and optimizer state (FSDP2) and share the
    micro-batches: Ray actors with a GPU each."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch, for rows whose activations one cannot hold:
    each has 1/n of them, and all of some heads in attention (Ulysses). Divides `ranks` and the
    model's attention heads, and is 1 for a model that reads pictures; `micro_batch_tokens` stay
    those of one rank."""
    reduce: Literal["auto", "each", "last"] = "auto"
    """Time at which ranks sum their gradients. `each`: after every micro-batch; `last`: once a
    step, which keeps the whole gradient in float32 on every rank (16 GB of a 4B) and sends less;
    `auto`: `last` where it fits (`backends/torch/memory.py`)."""
    num_threads: int | None = Field(default=None, ge=1)
    """torch's threads in this process; null leaves them as they are."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of torch, for dropout and for new weights such as adapters. Default `run.seed`."""
    deterministic: bool = False
    """CUDA kernels that give the same bits in every run, slower; the CPU's always do."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a backend that an installed package adds: the keys of its own `options` model."""

    def resolved(self, on_cuda: bool) -> TorchBackendConfig:
        """This section with every `auto` of `dtype`, `gradient_checkpointing` and `compile` as it
        is on that device."""
        on_device = {
            "dtype": "bfloat16" if on_cuda else "float32",
            "gradient_checkpointing": on_cuda,
            "compile": on_cuda,
        }
        auto = {name: x for name, x in on_device.items() if getattr(self, name) == "auto"}
        return self.model_copy(update=auto)

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lora") is not None and "lr" not in values:
            return {**values, "lr": LORA_RATE * FULL_LR}
        return values

    @model_validator(mode="after")
    def _scheduler_fits(self) -> TorchBackendConfig:
        if self.scheduler == "constant":
            for name in ("scheduler_steps", "min_lr_ratio"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)} with scheduler 'constant', which never "
                        "decays; choose 'linear' or 'cosine', or remove it"
                    )
        elif self.scheduler_steps is None:
            raise ValueError(
                f"scheduler is {self.scheduler!r} but scheduler_steps is not set; give the "
                "updates of the whole run, e.g. ${trainer.total_steps}"
            )
        elif self.scheduler_steps <= self.warmup_steps:
            raise ValueError(
                f"scheduler_steps ({self.scheduler_steps}) does not exceed warmup_steps "
                f"({self.warmup_steps}); nothing would be left to decay"
            )
        return self

    @model_validator(mode="after")
    def _context_divides_ranks(self) -> TorchBackendConfig:
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel}, which does not divide ranks "
                f"({self.ranks}); ranks share micro-batches in groups of as many"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> TorchBackendConfig:
        known = {option for options in OPTIMIZER_OPTIONS.values() for option in options}
        for name in sorted(known - set(OPTIMIZER_OPTIONS[self.optimizer])):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but optimizer {self.optimizer!r} has no "
                    f"{name}; remove it"
                )
        if self.optimizer in ("adamw_8bit", "adafactor") and self.ranks > 1:
            raise ValueError(
                f"optimizer {self.optimizer!r} does not work on weights sharded over ranks "
                f"({self.ranks}); take 'adamw', whose state the ranks share, or 'sgd'"
            )
        return self


class CriticConfig(Section):
    """The value model that `adv_estimator: gae` trains (`backends/torch/critic.py`). How it
    computes (device, dtype, rows, micro-batches, optimizer, ranks) is the `backend` section's; it
    has no LoRA."""

    path: Path | None = None
    """Hugging Face directory of its backbone, with the policy's vocabulary; null = `model.path`."""
    lr: float = Field(default=1e-5, gt=0)
    """Constant, and usually above the policy's: the head starts at 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    cliprange_value: float | None = Field(default=0.5, gt=0)
    """A value earns nothing by moving further than this from the batch's old one, within one
    batch; in units of the return. null = no clipping."""
    loss_agg_mode: ValueAggregation = "token-mean"
    """Unit that counts alike in the value loss: each token, each step's response (a sequence), or
    each trajectory."""
    warmup_updates: int = Field(default=0, ge=0)
    """The first updates train the critic alone: the policy would follow its noise. They count as
    optimizer steps of the run."""

    def model_config_of(self, backend: TorchBackendConfig) -> TorchBackendConfig:
        """`backend` with the critic's own optimizer settings."""
        own = {
            "lr": self.lr,
            "max_grad_norm": self.max_grad_norm,
            "scheduler": "constant",
            "scheduler_steps": None,
            "min_lr_ratio": 0.0,
            "warmup_steps": 0,
            "lora": None,
            "reference_path": None,
        }
        return TorchBackendConfig.model_validate(backend.model_dump() | own)


class VerlConfig(Section):
    """Layout of Steps as rows for verl (`backends/verl/backend.py`)."""

    rows: Literal["merged", "step"] = "merged"
    """`merged`: one row per branch of a trajectory, what tools wrote between its turns masked.
    `step`: one row per LLM call."""
    prompt_length: int | None = Field(default=None, ge=1)
    """Width that prompts are padded to, verl's `rollout.prompt_length`; null = the batch's longest.
    A longer one is an error: nothing is cut."""
    response_length: int | None = Field(default=None, ge=1)
    """Likewise of responses, what tools wrote between turns included."""
    pad_token_id: int = Field(default=0, ge=0)
    """Id that fills the padding; no mask lets it through."""
    model_path: Path | None = None
    """Folder of a model that reads pictures: its rows have `multi_modal_inputs` and position ids of
    four rows. null: steps with pictures are refused."""
