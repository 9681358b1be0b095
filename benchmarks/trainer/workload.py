"""Data of `python -m benchmarks trainer`: groups of multi-turn trajectories, and
two models for them.

A rollout of `turns` steps: every prompt is the prompt and response before it and `turn` tokens of
an environment, so that a step's row holds what all steps before it held. Token ids are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from stepwell.datapool.types import Step, TokenIds

ModelName: TypeAlias = Literal["tiny", "29M"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The batch of one optimizer step."""

    prompts: int = 8
    rollouts: int = 8
    turns: int = 4
    prompt: int = 256
    """Tokens of the first prompt."""
    turn: int = 96
    """Tokens that the environment adds between two responses."""
    response: int = 48

    @property
    def longest(self) -> int:
        """Tokens of the last step's row."""
        return self.prompt + self.turns * self.response + (self.turns - 1) * self.turn


FULL = Shape()


def groups(shape: Shape, vocab: int, seed: int = 0) -> list[list[Step]]:
    """The steps of each prompt's rollouts, trajectory by trajectory."""
    draw = np.random.default_rng(seed)

    def tokens(n: int) -> TokenIds:
        return draw.integers(0, vocab, n).astype(np.int32)

    found = []
    for p in range(shape.prompts):
        prompt = tokens(shape.prompt)
        steps = []
        for r in range(shape.rollouts):
            context = prompt
            for turn in range(shape.turns):
                response = tokens(shape.response)
                steps.append(
                    Step(
                        prompt_ids=context,
                        response_ids=response,
                        trajectory_uid=f"p{p}-r{r}",
                        prompt_uid=f"p{p}",
                        step_index=turn,
                        parent_index=turn - 1 if turn else None,
                        is_last=turn == shape.turns - 1,
                    )
                )
                context = np.concatenate([context, response, tokens(shape.turn)])
        found.append(steps)
    return found


def logical_tokens(steps: list[Step]) -> int:
    """Tokens of all steps, each with its whole prompt: what is trained, however it is computed."""
    return sum(step.n_tokens for step in steps)


def make_model(name: ModelName, folder: Path) -> int:
    """A Qwen3 with random weights in `folder`; its vocabulary size.

    `tiny` has the shape of the quickstart's model (0.85 M parameters), `29M` that of a small real
    one: 8 layers of width 512, 8 heads on 4 key/value heads, 8,192 tokens.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocab, hidden, layers, heads = (512, 128, 4, 4) if name == "tiny" else (8192, 512, 8, 8)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return vocab
