"""Models of a few thousand parameters, steps for them, and a forward pass without code of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from stepwell.datapool.types import Step

VOCAB = 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Configuration fields that the families of decoders have in common."""
SMALL_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}


def qwen3(**changes: Any) -> Qwen3Config:
    """A tied Qwen3 whose random weights give a policy far from uniform."""
    form = {"head_dim": 8, "tie_word_embeddings": True, "initializer_range": 0.2, "eos_token_id": 1}
    return Qwen3Config(**(SMALL | form | changes))


def save_model(config: PretrainedConfig, path: Path, seed: int = 0) -> Path:
    """Random weights from `seed`, as a Hugging Face directory."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def plain_forward(model: Any, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
    """log π and entropy of each response token, one step at a time, all logits."""
    log_probs, entropies = [], []
    for s in steps:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
        p = len(s.prompt_ids)
        logits = model(input_ids=ids[None]).logits[0, p - 1 : -1] / s.temperature
        distribution = torch.distributions.Categorical(logits=logits)
        log_probs.append(distribution.log_prob(ids[p:]))
        entropies.append(distribution.entropy())
    return torch.cat(log_probs), torch.cat(entropies)
