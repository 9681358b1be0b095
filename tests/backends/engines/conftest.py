"""Tiny random models and running engines.

`engine` is parametrised over engine kinds: `STEPWELL_TEST_ENGINES=sglang` runs the contract suite
against a real SGLang (`make test-sglang`), the default is the embedded engine. Everything listens
on 127.0.0.1 at a free port and is stopped by its own supervisor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from tests.builders import until

torch.set_num_threads(1)

CONTEXT = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_IDS = list(range(2, 12))
"""Many end ids, so that a random model does stop by itself."""


def save_tokenizer(path: Path) -> None:
    """One token per printable ASCII character: every output is readable text."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(path)


VOCAB = len(SPECIALS) + 94 + 2


def save_qwen3(path: Path, seed: int, hidden: int = 32, head_dim: int = 16) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=64,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=EOS_IDS,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def save_llama(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=EOS_IDS,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return path


@dataclass(frozen=True)
class Models:
    """Model directories: two sets of weights of one architecture, and another architecture."""

    base: Path
    new: Path
    wide: Path
    llama: Path


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(
        base=save_qwen3(root / "base", 0),
        new=save_qwen3(root / "new", 1),
        wide=save_qwen3(root / "wide", 2, hidden=48),
        llama=save_llama(root / "llama", 3),
    )


class Reference:
    """Log-probs by one plain full forward: what any engine must agree with."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(
        self, prompt: list[int], output: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """log p(output | prompt) per token, shape [len(output)]."""
        logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return log_probs.gather(1, torch.tensor(output)[:, None])[:, 0]


@pytest.fixture(scope="session")
def reference(model_dirs: Models) -> Callable[[Path], Reference]:
    cache: dict[Path, Reference] = {}

    def get(path: Path) -> Reference:
        return cache.setdefault(path, Reference(path))

    return get


@dataclass(frozen=True)
class Engine:
    """A running engine for a test."""

    url: str
    base: Path
    kind: str


def engine_config(kind: str, model_path: Path, **fields: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"kind": kind, "model_path": model_path, "dtype": "float32", **fields}
    )


def _kinds() -> list[str]:
    return os.environ.get("STEPWELL_TEST_ENGINES", "embedded").split(",")


@pytest.fixture(scope="session", params=_kinds())
def engine_kind(request: pytest.FixtureRequest) -> str:
    """Kind of the engines that a test starts for itself."""
    return str(request.param)


@pytest.fixture(scope="session", params=_kinds())
def _running(
    request: pytest.FixtureRequest, model_dirs: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    config = engine_config(request.param, model_dirs.base, max_running_requests=8)
    supervisor = Supervisor(config, tmp_path_factory.mktemp("logs"))
    try:
        yield Engine(supervisor.start(), model_dirs.base, request.param)
    finally:
        supervisor.stop()


@pytest.fixture
async def engine(_running: Engine) -> AsyncIterator[Engine]:
    """The running engine, unpaused, idle and on its first weights when a test begins."""
    yield _running
    async with EngineClient(_running.url) as client:
        await client.continue_()
        await client.abort()
        info = await client.model_info()
        if (info["model_path"], info["weight_version"]) != (str(_running.base), "0"):
            await client.update_weights_from_disk(str(_running.base), 0)
        await until(lambda: _idle(client))
        await client.flush()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.url) as client:
        yield client


async def _idle(client: EngineClient) -> bool:
    load = (await client.loads())["loads"][0]
    return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0


@pytest.fixture(scope="session", name="make_engine_config")
def _make_engine_config() -> Callable[..., EngineConfig]:
    return engine_config
