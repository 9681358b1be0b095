"""The tasks of `make demo-more`: environment, tool, reward and data, against a policy that answers
from a script; and, as long tests, that a run learns."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tasks import GAINS
from examples.colours import agent as colours
from examples.colours import prepare as cards
from examples.harness_shell import prepare as sums
from examples.instructions import agent as instructed
from examples.instructions import prepare as requests
from examples.instructions import reward as instructions
from examples.search_cite import agent as search
from examples.search_cite import prepare as towns
from examples.search_cite.reward import score
from examples.tictactoe import agent as tictactoe
from examples.tictactoe import prepare as games
from stepwell.config.load import load_config
from stepwell.quickstart.agent import http_client
from stepwell.quickstart.make_model import CONTROL, ChatTokens, make_tokenizer
from stepwell.trainer.data.tasks import open_tasks
from tests.examples.scripted import Policy, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
async def _close_the_shared_connections() -> AsyncIterator[None]:
    yield
    await http_client(asyncio.get_running_loop()).aclose()
    http_client.cache_clear()


# ── the game ─────────────────────────────────────────────────────────────────────────────────────


def opponents(seed: int, *moves: str) -> list[str]:
    """Answers of a game to these moves."""
    game = tictactoe.Game(seed)
    return [game.play(move) for move in moves]


def winning(seed: int) -> list[str]:
    """Moves that win against this opponent, found by trying."""
    for attempt in range(1000):
        rng, game, moves = random.Random(attempt), tictactoe.Game(seed), []
        while game.reward is None:
            moves.append(f"[{rng.choice(game.free())}]")
            game.play(moves[-1])
        if game.reward == 1.0:
            return moves
    raise AssertionError(f"no game against {seed} was won")


def test_the_opponent_answers_each_move_the_same_in_every_game_of_a_seed() -> None:
    first, again = opponents(7, "[4]", "none"), opponents(7, "[4]", "none")
    assert first == again
    board, warning = first
    assert board[:5] + board[6:] != "012 345 678"
    assert (board[5], board.count("O"), board.count("X")) == ("O", 1, 1)
    assert "does not follow the correct format" in warning
    assert warning.endswith(board)
    assert len({opponents(seed, "[4]")[0] for seed in range(20)}) > 3


def test_a_second_move_that_is_none_loses_the_game() -> None:
    game = tictactoe.Game(7)
    game.play("[4]")
    assert "occupied" in game.play("[4]")
    assert game.reward is None
    game.play("four")
    assert game.reward == 0.0


async def test_the_agent_plays_a_game_to_its_end_and_returns_its_result() -> None:
    moves = winning(3)
    task = {"question": games.question(3), "metadata": {"seed": 3}}
    async with serving(Policy(*moves)) as policy:
        assert await tictactoe.agent(task, policy.base_url, "key") == 1.0
    assert len(policy.requests) == len(moves)
    said = policy.requests[-1]["messages"]
    assert said[0] == {"role": "user", "content": task["question"]}
    assert [m["content"] for m in said[1::2]] == moves[:-1]
    assert [m["content"] for m in said[2::2]] == opponents(3, *moves[:-1])
    async with serving(Policy("I pass")) as policy:
        assert await tictactoe.agent(task, policy.base_url, "key") == 0.0


def test_the_games_shown_beforehand_are_legal_and_as_the_template_renders_them() -> None:
    tokens = ChatTokens(make_tokenizer(games.texts()))
    episode = games.episode(tokens, games.WARM_UP)
    messages = [{"role": "user", "content": games.question(games.WARM_UP)}]
    game = tictactoe.Game(games.WARM_UP)
    for part, learnt in episode[1:]:
        if learnt:
            move = str(tokens.tokenizer.decode(part)).removesuffix("<|im_end|>")
            heard = game.play(move)
            assert "invalid" not in heard
            if game.reward is None:
                messages.append({"role": "assistant", "content": move})
                messages.append({"role": "user", "content": heard})
    assert game.reward is not None
    rendered = tokens.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert [i for part, _ in episode[:-1] for i in part] == rendered


# ── search and citation ──────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A question of the data that the preset trains on, beside its documents."""
    folder = tmp_path_factory.mktemp("towns")
    towns.write_data(folder)
    task: dict[str, Any] = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    return task


def query(text: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": text})}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def test_a_search_for_name_and_country_finds_the_document_with_the_answer_first(
    asked: dict[str, Any],
) -> None:
    town, _, country = asked["question"].split("founded")[0].split()[-3:]
    async with serving(Policy(query(f"{town} {country}"), "1432 [d1]")) as policy:
        assert await search.agent(asked, policy.base_url, "key") is None
    search.helper.cache_clear()
    (tool,) = policy.requests[0]["tools"]
    assert tool["function"]["name"] == "search"
    result = policy.requests[1]["messages"][-1]["content"]
    first, second = result.split("\n\n")
    assert first.startswith(f"[{asked['metadata']['document']}] {town}, {country}\n")
    assert asked["answer"] in first
    assert second


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("1432 [d17]", 1.0),
        (" 1432 [d17]\n", 1.0),
        ("1432", 0.5),
        ("1432 [d18]", 0.5),
        ("1433 [d17]", 0.0),
        ("1432 [d17] [d18]", 0.0),
        ("1432 or 1433 [d17]", 0.0),
        ("[d17]", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_half_the_reward_and_its_source_the_other(reply: str, expected: float) -> None:
    task = {"metadata": {"document": "d17"}}
    assert score("year", reply, "1432", task)["score"] == expected


def test_the_questions_held_out_are_of_other_towns(tmp_path: Path) -> None:
    towns.write_data(tmp_path)
    of = {
        name: {
            json.loads(row)["metadata"]["document"] for row in (tmp_path / f"{name}.jsonl").open()
        }
        for name in ("train", "val")
    }
    assert of["train"]
    assert of["val"]
    assert not of["train"] & of["val"]


@pytest.mark.parametrize("habit", towns.HABITS)
def test_an_answer_that_is_shown_beforehand_is_copied_from_the_first_document(
    habit: towns.Habit,
) -> None:
    tokens = ChatTokens(make_tokenizer(towns.texts()), [{"function": {"name": "search"}}])
    episode = towns.episode(tokens, random.Random(5), {habit: 1.0}, cite=1.0)
    *before, (answer, learnt) = episode
    text = str(tokens.tokenizer.decode(answer)).removesuffix("<|im_end|>")
    assert learnt
    if habit == "guess":
        assert len(before) == 1
    else:
        first = str(tokens.tokenizer.decode(before[-1][0])).split("\n\n")[0]
        fact, _, source = text.partition(" ")
        assert fact in first
        assert source in first


# ── instructions ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("instruction", "reply", "followed"),
    [
        ("one_word", "Honey.", True),
        ("one_word", "Sweet honey.", False),
        ("one_word", "", False),
        ("long", "It is sweet and golden, and bees make it all summer long.", True),
        ("long", "It is sweet.", False),
        ("begin", "I like it.", True),
        ("begin", "It is sweet.", False),
        ("begin", "", False),
        ("exclaim", "It is sweet!", True),
        ("exclaim", "Sweet! It is.", False),
    ],
)
async def test_a_reply_that_follows_its_instruction_scores_one(
    instruction: str, reply: str, followed: bool
) -> None:
    text = instructions.INSTRUCTIONS[instruction].text
    task = {"question": f"Tell me about honey. {text}", "data_source": instruction}
    async with serving(Policy(reply)) as policy:
        assert await instructed.agent(task, policy.base_url, "key") is None
    (request,) = policy.requests
    assert request["messages"] == [{"role": "user", "content": task["question"]}]
    assert instructions.score(instruction, f" {reply}\n", None, task) == float(followed)


def test_no_reply_follows_every_instruction() -> None:
    follows = [i.followed for i in instructions.INSTRUCTIONS.values()]
    assert not any(all(f(reply) for f in follows) for reply in ("I!", "I " * 11 + "am!"))


# ── the cards ────────────────────────────────────────────────────────────────────────────────────


async def test_a_card_is_turned_by_the_tool_and_scored_by_the_colours_that_are_named() -> None:
    task = {
        "question": cards.question(7),
        "metadata": {"seed": 7, "colours": ["red", "blue"], "shown": ["pink", "black"]},
    }
    call = {"id": "c", "type": "function", "function": {"name": "turn", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    for answer, expected in (("red blue", 1.0), ("red red", 0.5), ("red", 0.0), ("blue red", 0.0)):
        async with serving(Policy(turn, answer)) as policy:
            assert await colours.agent(task, policy.base_url, "key") == expected
    first, second = (request["messages"] for request in policy.requests)
    assert first[0]["content"][1] == colours.picture(colours.card("pink", 7))
    assert second[-1]["role"] == "tool"
    assert second[-1]["content"] == [colours.picture(colours.card("black", 8))]
    async with serving(Policy(turn)) as policy:
        assert await colours.agent(task, policy.base_url, "key") == 0.0


def test_the_control_asks_the_held_out_questions_with_the_pictures_of_other_cards(
    tmp_path: Path,
) -> None:
    cards.write_data(tmp_path)
    train, val, control = (
        [json.loads(row) for row in (tmp_path / f"{name}.jsonl").open()]
        for name in ("train", "val", "other_pictures")
    )
    assert all(t["metadata"]["shown"] == t["metadata"]["colours"] for t in train + val)
    for task, other, following in zip(val[:-1], control[:-1], val[1:], strict=True):
        shown = following["metadata"]["colours"]
        assert other == task | {"metadata": task["metadata"] | {"shown": shown}}


def test_the_cards_shown_beforehand_are_as_the_template_renders_them() -> None:
    tokenizer = make_tokenizer(
        cards.texts(), [*CONTROL, *cards.VISION], cards.TEMPLATE.read_text(encoding="utf-8")
    )
    seed = cards.WARM_UP
    shown = cards.episode(ChatTokens(tokenizer, colours.TOOLS), seed, skill=True)
    call = {"id": "c", "type": "function", "function": {"name": "turn", "arguments": "{}"}}
    parts = [{"type": "text", "text": cards.question(seed)}, {"type": "image"}]
    said = " ".join(cards.colours(seed))
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]},
            {"role": "assistant", "content": said},
        ],
        tools=colours.TOOLS,
        tokenize=False,
    )
    assert tokenizer.decode(shown.ids) + "\n" == rendered
    assert len(shown.pngs) == 2


# ── presets and runs ─────────────────────────────────────────────────────────────────────────────


WRITERS: dict[str, Callable[[Path], None]] = {
    "tictactoe": games.write_data,
    "search_cite": towns.write_data,
    "instructions": requests.write_data,
    "harness_shell": sums.write_data,
    "colours": cards.write_data,
}


@pytest.mark.parametrize("task", GAINS)
def test_the_preset_reads_the_data_that_its_script_makes(task: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    WRITERS[task](model)
    config = load_config(task, [f"model.path={model}"], here=False)
    assert config.data is not None
    assert config.data.val is not None
    train, val = open_tasks(config.data.train), open_tasks(config.data.val)
    assert len(train) >= config.trainer.total_steps * config.trainer.train_batch_size / 10
    assert not {t["question"] for t in train} & {t["question"] for t in val}


@pytest.mark.long
@pytest.mark.parametrize(
    "task", ["tictactoe", "search_cite", "colours"]
)  # instructions: make demo-more
def test_a_run_learns(task: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "tasks", "--only", task, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert (tmp_path / "runs" / f"{task}.png").read_bytes().startswith(b"\x89PNG")
    assert "## After" in (tmp_path / "runs" / f"{task}.md").read_text()
