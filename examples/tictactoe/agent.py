"""An agent that plays TextArena's TicTacToe against an opponent who moves at random.

The environment is the referee: it reads `[n]` out of a reply, warns once of a move that is none,
draws the board, and says who has won. The agent passes that on, the board in 11 tokens in place of
60: `0X2 3O5 678`, a number where a cell is free.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from stepwell.quickstart.agent import http_client

GAME = "TicTacToe-v0-raw"
RULES = "Tic Tac Toe. You are O and begin. For example [4]."
POLICY, OPPONENT = 0, 1


class Game:
    """One game; `seed` chooses the opponent's moves.

    Attributes:
        opening: what the policy hears first: the empty board.
        reward: None while the game is on; then 1 for a win, 0.5 for a draw, 0 for a loss, two moves
            in a row that are none included.
    """

    def __init__(self, seed: int) -> None:
        import textarena  # 0.3 s to import: only for those who play

        self._rng = random.Random(seed)
        self._env: Any = textarena.make(GAME)
        self._env.reset(num_players=2, seed=seed)
        self.reward: float | None = None
        self.opening = self._heard()

    def play(self, reply: str) -> str:
        """Make a move; returns the board after the opponent's, or also why it was none."""
        self._step(reply)
        if self.reward is None and self._env.state.current_player_id == OPPONENT:
            self._step(f"[{self._rng.choice(self.free())}]")
        if self.reward is not None:
            return ""
        return self._heard()

    def free(self) -> list[int]:
        """Cells that nobody has taken."""
        cells = [mark for row in self._env.state.game_state["board"] for mark in row]
        return [cell for cell, mark in enumerate(cells) if not mark]

    def _heard(self) -> str:
        """Warnings, and the last board that was drawn."""
        _, messages = self._env.get_observation()
        warnings = [text for _, text, kind in messages if kind.name == "GAME_ADMIN"]
        drawn = [text for _, text, kind in messages if kind.name == "GAME_BOARD"][-1]
        cells = "".join(re.findall(r"[XO\d]", drawn.split("Available Moves")[0].split(":")[1]))
        return "\n".join([*warnings, f"{cells[:3]} {cells[3:6]} {cells[6:]}"])

    def _step(self, move: str) -> None:
        over, _ = self._env.step(move)
        if over:
            self.reward = (self._env.close()[0][POLICY] + 1) / 2


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One game: 1 if it is won, 0.5 if it is drawn."""
    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_client=http_client(asyncio.get_running_loop()),
    )
    game = Game(task["metadata"]["seed"])
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, temperature=1.0, max_tokens=8
        )
        text = reply.choices[0].message.content or ""
        heard = game.play(text)
        if game.reward is not None:
            return game.reward
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": heard}]
