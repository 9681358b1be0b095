"""Makes the quickstart's model: a tiny transformer that can use its calculator but seldom does.

    python -m stepwell.quickstart.make_model [--out examples/quickstart/model]

From nothing, with a fixed seed, on one thread: a 512-token byte-level BPE, a 0.85 M-parameter Qwen3
and a warm-up on a mixture. Some demonstrations call the calculator and copy its result; most guess
in the head and are wrong. So the skill is there and the habit is not: what reinforcement learning
has to teach. Every demonstration is rendered by the chat template with the agent's own tool schema,
so the prompts of training are in distribution token for token.

The result is shipped in `model/`; nobody needs to run this to train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, ReplyParser
from stepwell.quickstart.agent import MAX_TOKENS, TOOLS, calculator
from stepwell.trainer.rewards.reasoning_gym import score

HERE = Path(__file__).parent
DATASET: dict[str, Any] = {
    "name": "chain_sum",
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 2,
    "max_digits": 3,
}
# reasoning_gym draws item i from Random(seed + i): two sources are disjoint in seeds only if
# [seed, seed + size) do not overlap. The presets train from 1_000_000 and evaluate from 9_000_000.
WARM_UP_SEED = 50_000_000
EVAL_SEED = 90_000_000

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

# ── tokenizer ────────────────────────────────────────────────────────────────────────────────────

CHAT_TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")


def make_tokenizer(
    texts: Iterable[str] | None = None,
    control: Sequence[str] = CONTROL,
    template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """512 tokens: the bytes, `control` and tool markup, and merges learnt from `texts`, by default
    the quickstart's. Digits stay single, so that numbers are copied digit by digit."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus() if texts is None else texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=[AddedToken(t, special=True) for t in [*control, *MARKUP]],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # As in Qwen, tool and thinking markup is text to the reader: it survives skip_special_tokens.
    spec = json.loads(bpe.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in control
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # untyped in transformers
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=2048,
    )
    tokenizer.chat_template = template
    return tokenizer


def corpus() -> Iterator[str]:
    """Yield the texts that the merges are learnt from: the questions, the calls, the roles, and
    some other tasks' words to fill the vocabulary."""
    import reasoning_gym

    for task in tasks(WARM_UP_SEED, 1000):
        yield task["question"]
        yield tool_call(task["metadata"]["expression"])
        yield "error: not an arithmetic expression"
        yield "Tools: calculator(expression)\nuser\nassistant\nsystem\ntool"
        yield "You are a helpful assistant."
    for name in ("leg_counting", "basic_arithmetic", "word_sorting", "simple_equations"):
        for task in reasoning_gym.create_dataset(name, size=100, seed=WARM_UP_SEED):
            yield task["question"]


# ── demonstrations ───────────────────────────────────────────────────────────────────────────────


def tasks(seed: int, size: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    yield from reasoning_gym.create_dataset(**DATASET, seed=seed, size=size)


def tool_call(expression: str) -> str:
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


Episode: TypeAlias = list[tuple[list[int], bool]]
"""Consecutive token ids, and whether the model is to learn them."""
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""ids and labels, [B, T]; -100 where there is no loss."""


def rows(episodes: Sequence[Episode]) -> Rows:
    """One padded row per episode."""
    ids = [[i for part, _ in parts for i in part] for parts in episodes]
    labels = [[i if loss else -100 for part, loss in parts for i in part] for parts in episodes]
    width = max(map(len, ids))
    return (
        torch.tensor([r + [0] * (width - len(r)) for r in ids]),
        torch.tensor([r + [-100] * (width - len(r)) for r in labels]),
    )


class ChatTokens:
    """Token ids of a conversation's parts, exactly as the gateway will string them together."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tools: Sequence[Any] = ()) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        ids = self.tokenizer.apply_chat_template(
            messages, tools=self.tools or None, add_generation_prompt=True, return_dict=False
        )
        return cast(list[int], ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def turn(self, text: str) -> list[int]:
        """Token ids that the model samples in one turn, its end token included."""
        return [*self.encode(text), self.tokenizer.eos_token_id]

    def user(self, text: str) -> list[int]:
        """Token ids between one sampled turn and the next."""
        return self.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def tool_result(self, result: str) -> list[int]:
        """The same, where a tool answers."""
        return self.user(f"<tool_response>\n{result}\n</tool_response>")


class Demonstrations(ChatTokens):
    """Turns the quickstart's tasks into token ids and a loss mask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        super().__init__(tokenizer, TOOLS)
        self.rng = random.Random(seed)

    def with_tool(self, task: dict[str, Any]) -> Episode:
        """Call, read, answer; now and then the first call fails and is made again."""
        expression = task["metadata"]["expression"]
        parts = [(self.prompt(task["question"]), False)]
        if self.rng.random() < 0.08:
            broken = expression[: self.rng.randrange(len(expression))].rstrip("0123456789")
            result = calculator(json.dumps({"expression": broken}))
            # The mistake is shown, not taught: only the recovery carries loss.
            parts += [(self.turn(tool_call(broken)), False), (self.tool_result(result), False)]
        result = calculator(json.dumps({"expression": expression}))
        parts += [(self.turn(tool_call(expression)), True), (self.tool_result(result), False)]
        return [*parts, (self.turn(task["answer"]), True)]

    def in_the_head(self, task: dict[str, Any]) -> Episode:
        """A guess: right half of the time in the data, far less often once a 0.85 M model has
        to add three numbers without a tool."""
        off = self.rng.choice([-100, -20, -10, -1, 1, 10, 20, 100]) * self.rng.randint(0, 1)
        guess = str(int(task["answer"]) + off)
        return [(self.prompt(task["question"]), False), (self.turn(guess), True)]

    def batches(
        self, updates: int, tool_share: float, batch_size: int = 32
    ) -> Iterator[list[Rows]]:
        """First pure tool use (the skill), then the mixture (the habit of guessing)."""
        source = tasks(WARM_UP_SEED, updates * batch_size)
        for update in range(1, updates + 1):
            share = 1.0 if update <= 0.4 * updates else tool_share
            yield self.batch([next(source) for _ in range(batch_size)], share)

    def batch(self, some: list[dict[str, Any]], tool_share: float) -> list[Rows]:
        """The episodes of one update, short and long ones apart so that little is padding."""
        with_tool = [self.rng.random() < tool_share for _ in some]
        long = [self.with_tool(t) for t, tool in zip(some, with_tool, strict=True) if tool]
        short = [self.in_the_head(t) for t, tool in zip(some, with_tool, strict=True) if not tool]
        return [rows(episodes) for episodes in (long, short) if episodes]


# ── model ────────────────────────────────────────────────────────────────────────────────────────


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_up(
    model: Qwen3ForCausalLM,
    batches: Iterable[Sequence[Rows]],
    updates: int,
    peak_lr: float = 2e-3,
) -> None:
    """`updates` supervised updates, each on the rows of one batch.

    Muon on the matrices: with AdamW alone, copying digits takes several times as many updates to
    learn (accuracy with the tool after 400 updates of 32: 1.00 against 0.05).
    """
    decoder = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not d for d in decoder)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(decoder, lr=peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak_lr, weight_decay=0.01, betas=(0.9, 0.98)),
    ]
    started = time.monotonic()
    model.train()
    for update, batch in zip(range(1, updates + 1), batches, strict=True):
        lr = peak_lr * min(1.0, update / 30) * max(0.03, 1 - update / updates)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        n_tokens = sum(int((labels != -100).sum()) for _, labels in batch)
        total = 0.0
        for ids, labels in batch:
            learnt = labels[:, 1:] != -100
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][learnt]
            logits = model.lm_head(hidden)
            loss = cross_entropy(logits, labels[:, 1:][learnt], reduction="sum") / n_tokens
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if update % 100 == 0:
            print(
                f"update {update}  {time.monotonic() - started:.0f} s  loss {total:.3f}", flush=True
            )


# ── measurement ──────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], max_new_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """One response per prompt at temperature 1, end token included."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    generator: Any = model  # generate() is typed for a mixin that the class does not declare
    out = generator.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )[:, width:].tolist()
    return [r[: r.index(eos) + 1] if eos in r else r for r in out]


def measure(
    model: Qwen3ForCausalLM, demonstrations: Demonstrations, n: int = 256, turns: int = 3
) -> dict[str, float]:
    """Accuracy, tool use and how often a used tool leads to the answer, over `n` fresh tasks."""
    model.eval()  # type: ignore[no-untyped-call] # untyped in transformers
    tokenizer = demonstrations.tokenizer
    some = list(tasks(EVAL_SEED, n))
    state = {i: demonstrations.prompt(t["question"]) for i, t in enumerate(some)}
    used: set[int] = set()
    right: set[int] = set()
    for _ in range(turns):
        if not state:
            break
        responses = sample(model, list(state.values()))
        following: dict[int, list[int]] = {}
        for (i, prompt), response in zip(state.items(), responses, strict=True):
            text = str(tokenizer.decode(response)).removesuffix("<|im_end|>")
            parser = ReplyParser(tools=True, reasoning=False)
            deltas = [*parser.feed(text), *parser.finish()]
            calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
            content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
            if calls:
                used.add(i)
                result = calculator(calls[0].arguments)
                following[i] = prompt + response + demonstrations.tool_result(result)
            elif score("chain_sum", content, some[i]["answer"]):
                right.add(i)
        state = following
    return {
        "accuracy": len(right) / n,
        "tool_use": len(used) / n,
        "accuracy_with_tool": len(right & used) / max(1, len(used)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--updates", type=int, default=700)
    parser.add_argument("--tool-share", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    demonstrations = Demonstrations(tokenizer, options.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    warm_up(model, demonstrations.batches(options.updates, options.tool_share), options.updates)
    figures = measure(model, demonstrations)
    print(json.dumps(figures))
    save(model, tokenizer, options.out)


def make(
    folder: Path,
    texts: Iterable[str],
    batches: Callable[[ChatTokens], Iterable[Sequence[Rows]]],
    updates: int,
    tools: Sequence[Any] = (),
    seed: int = 0,
) -> None:
    """A model of this kind for another task: tokenizer of `texts`, warm-up on `batches`, saved."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    warm_up(model, batches(ChatTokens(tokenizer, tools)), updates)
    save(model, tokenizer, folder)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder, as `model.path` takes it."""
    sampling = {"do_sample": True, "temperature": 1.0}
    model.generation_config.update(**sampling)  # type: ignore[no-untyped-call] # untyped in transformers
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
