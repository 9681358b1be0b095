"""Makes what the cards are trained with: a tiny Qwen2-VL that can see but seldom says what it saw,
and the tasks.

    python -m examples.colours.prepare runs/colours-model

Supervised updates of the whole model, in half a minute of a core: first on cards that are turned
and named rightly, so that vision tower and decoder learn to see, then, at a lower rate, on cards
that are turned and mostly guessed. So the model always turns the card and names colours little
better than by chance; that looking pays is for reinforcement learning to find out, with the vision
tower frozen.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from examples.colours.agent import COLOURS, TOOLS, card
from stepwell.backends.pictures import CanonicalPicture, PictureProcessor
from stepwell.datapool.pictures import Picture
from stepwell.quickstart.make_model import CONTROL, ChatTokens, make_tokenizer

TRAIN, VAL, WARM_UP = range(1_000, 6_000), range(9_000, 9_128), 100_000
"""Seeds of cards: to train on, to evaluate on, and the first of the supervised ones."""
VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
TURN = '<tool_call>\n{"name": "turn", "arguments": {}}\n</tool_call>'
BATCH, SEEING, GUESSING = 16, 5e-3, 1e-3
"""Cards of an update, and the rates of the two parts."""
HONEST = 0.2
"""Share of the colours in the second part that are named as they are seen, and not by chance."""


def question(seed: int) -> str:
    """A number tells this card's prompt from another's."""
    return f"Card {seed % 10_000}. Which colours has it?"


def colours(seed: int) -> list[str]:
    return random.Random(seed).choices([*COLOURS], k=2)


class Episode(NamedTuple):
    """Token ids with one placeholder a picture, whether each is learnt, and the pictures."""

    ids: list[int]
    learnt: list[bool]
    pngs: list[bytes]


def episode(tokens: ChatTokens, seed: int, *, skill: bool) -> Episode:
    """One card, by a player who looks (`skill`) or mostly guesses."""
    rng, sides = random.Random(-seed), colours(seed)
    named = [side if skill or rng.random() < HONEST else rng.choice([*COLOURS]) for side in sides]
    parts = [
        (tokens.prompt(question(seed) + SHOWN), False),
        (tokens.turn(TURN), True),
        (tokens.tool_result(SHOWN), False),
        (tokens.turn(" ".join(named)), True),
    ]
    return Episode(
        [i for ids, _ in parts for i in ids],
        [learnt for ids, learnt in parts for _ in ids],
        [card(side, seed + i) for i, side in enumerate(sides)],
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    names = tokenizer.get_vocab()
    hidden = 128
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text,
            vision_config={"depth": 1, "embed_dim": 64, "hidden_size": hidden, "num_heads": 4},
            tie_word_embeddings=True,
            image_token_id=names["<|image_pad|>"],
            video_token_id=names["<|video_pad|>"],
            vision_start_token_id=names["<|vision_start|>"],
            vision_end_token_id=names["<|vision_end|>"],
            vision_token_id=names["<|vision_pad|>"],
        )
    )


def loss_of(model: Any, processor: PictureProcessor, episodes: Sequence[Episode]) -> torch.Tensor:
    """Mean cross-entropy of what is learnt in `episodes`, as one padded batch."""
    made = [[processor.canonical(png) for png in e.pngs] for e in episodes]
    features = processor.features([picture.png for pictures in made for picture in pictures])
    pixels, grid = (torch.from_numpy(features[n]) for n in ("pixel_values", "image_grid_thw"))
    seen = model.model.visual(pixels, grid_thw=grid).pooler_output
    rows = [_expand(processor, e, pictures) for e, pictures in zip(episodes, made, strict=True)]
    width = max(len(ids) for ids, _, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    positions = torch.zeros(3, len(rows), width, dtype=torch.int64)
    for r, (tokens, learnt, pictures) in enumerate(rows):
        n = len(tokens)
        ids[r, :n] = torch.from_numpy(tokens)
        labels[r, :n] = torch.from_numpy(np.where(learnt, tokens, -100))
        positions[:, r, :n] = torch.from_numpy(processor.positions(tokens, pictures))
    embeds = model.get_input_embeddings()(ids)
    places = (ids == processor.placeholder_id).flatten().nonzero().squeeze(1)
    embeds = embeds.flatten(0, 1).index_copy(0, places, seen).view_as(embeds)
    hidden = model.model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
    wanted = labels[:, 1:] != -100
    return cross_entropy(model.lm_head(hidden[:, :-1][wanted]), labels[:, 1:][wanted])


def _expand(
    processor: PictureProcessor, episode: Episode, made: Sequence[CanonicalPicture]
) -> tuple[np.ndarray, np.ndarray, list[Picture]]:
    ids = np.array(episode.ids)
    lengths = np.ones(len(ids), dtype=np.int64)
    places = np.flatnonzero(ids == processor.placeholder_id)
    lengths[places] = [picture.n_tokens for picture in made]
    starts = (np.cumsum(lengths) - lengths)[places]
    pictures = [
        Picture(p.digest, p.width, p.height, int(at), p.n_tokens)
        for p, at in zip(made, starts, strict=True)
    ]
    return np.repeat(ids, lengths), np.repeat(np.array(episode.learnt), lengths), pictures


def warm_up(
    model: Any, tokens: ChatTokens, processor: PictureProcessor, skill: int, guesses: int
) -> None:
    """Supervised updates of all weights: `skill` of them on what is seen, then `guesses`."""
    trained = list(model.parameters())
    matrices = {id(p) for p in model.model.language_model.layers.parameters() if p.ndim == 2}
    decoder = [p for p in trained if id(p) in matrices]
    others = [p for p in trained if id(p) not in matrices]
    first = WARM_UP
    for updates, lr, is_skill in ((skill, SEEING, True), (guesses, GUESSING, False)):
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(decoder, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=0.01, betas=(0.9, 0.98)),
        ]
        for update in range(updates):
            seeds = range(first, first + BATCH)
            first += BATCH
            loss = loss_of(model, processor, [episode(tokens, s, skill=is_skill) for s in seeds])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (update + 1) / 20) * max(0.05, 1 - update / updates)
                optimizer.step()
                optimizer.zero_grad()
        print(f"{updates} updates, skill: {is_skill}, loss {loss.item():.3f}", flush=True)


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer's merges are learnt from."""
    for seed in range(WARM_UP, WARM_UP + 300):
        yield from (question(seed), " ".join(colours(seed)), TURN, "Tools: turn()")
        yield "user\nassistant\nsystem\ntool"


def write_data(folder: Path) -> None:
    """Write the tasks, and those of the control: evaluated as before, but shown the next card."""
    for name, seeds, ahead in (("train", TRAIN, 0), ("val", VAL, 0), ("other_pictures", VAL, 1)):
        tasks = [
            {
                "question": question(seed),
                "metadata": {
                    "seed": seed,
                    "colours": colours(seed),
                    "shown": colours(seed + ahead),
                },
            }
            for seed in seeds
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def main(folder: Path, skill: int = 100, guesses: int = 60) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(texts(), [*CONTROL, *VISION], template)
    model = make_model(tokenizer)
    sampling = {"do_sample": True, "temperature": 1.0}
    model.generation_config.update(**sampling)  # type: ignore[no-untyped-call, union-attr, unused-ignore]
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    settings |= {"temporal_patch_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    processor = PictureProcessor.of(folder)
    if processor is None:
        raise RuntimeError("the model that was just made takes no pictures")
    warm_up(model, ChatTokens(tokenizer, TOOLS), processor, skill, guesses)
    model.save_pretrained(folder)
    write_data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
