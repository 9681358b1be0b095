"""A trained reward model: a sequence-classification head that reads the conversation and gives its
score.

    task's messages + answer ──chat template──► token ids ─┬─ `url`: POST /classify ─┬─► score
                                                           └─ `path`: a thread here ─┘

A server has SGLang's `/classify` (launched with `--is-embedding`); a model of a `path` is computed
by transformers on the CPU, one sequence at a time, so that no score depends on what else is asked.
Owns what the model reads. Does not own how often a server is asked (`server.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from stepwell.trainer.errors import RewardCrashError
from stepwell.trainer.rewards.base import question_of
from stepwell.trainer.rewards.server import RewardServer
from stepwell.trainer.tokenizers import tokenizer_at


class RewardModel:
    """The last logit of the head, as it is: its only one, or, of several, the last class's.

    Args:
        url: of a server, e.g. http://127.0.0.1:30000.
        path: in place of it, the model's directory: it is computed in a thread, on the CPU.
        tokenizer: of the reward model, whose chat template renders the task's messages and the
            answer; `path` by default.
        prompt: in place of the chat template, formatted with {question}, {solution_str},
            {ground_truth} and {data_source}; a server tokenises it.
        backoff_s, timeout_s, headers: as `RewardServer`; all tries together have
            `rollout.reward.timeout_s`. Loading the model of `path` is not counted.
    """

    def __init__(
        self,
        url: str | None = None,
        path: str | None = None,
        tokenizer: str | None = None,
        prompt: str | None = None,
        backoff_s: float = 1.0,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if (url is None) == (path is None):
            raise ValueError(
                f"url is {url!r} and path is {path!r}; give one of them: where a server runs, or "
                "the model's directory"
            )
        self._prompt = prompt
        self.places = None if path is None else asyncio.Semaphore(1)
        """Places of calls (`manager.py`): one thread computes. None: a server has its own."""
        self._scorer: _Scorer
        if path is not None:
            self._scorer = _Head(path)
        else:
            self._scorer = _Server(str(url), backoff_s, timeout_s, headers)
        if prompt is not None:
            self._fill("", "", None, {})  # an unknown name in braces is found now
        elif (tokenizer := tokenizer or path) is None:
            raise ValueError(
                "tokenizer and prompt are missing; give the reward model's tokenizer, whose chat "
                "template renders the conversation, or a prompt"
            )
        else:
            self._tokenizer: Any = tokenizer_at(Path(tokenizer).expanduser())
            if not self._tokenizer.chat_template:
                raise ValueError(
                    f"tokenizer is {tokenizer!r}, which has no chat template; set prompt to what "
                    "the model is to read, e.g. '{question}\\n{solution_str}'"
                )

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        **kwargs: Any,
    ) -> float:
        """
        Raises:
            RewardCrashError: the server refuses the request, or answers no score; or the model has
                no room for the conversation.
        """
        if self._prompt is not None:
            text = self._fill(data_source, solution_str, ground_truth, extra_info)
            return await self._scorer.score(text)
        return await self._scorer.score(
            await asyncio.to_thread(self._ids, solution_str, extra_info)
        )

    async def wait_loaded(self) -> None:
        """Return once the model of `path` is loaded."""
        await self._scorer.wait_loaded()

    async def aclose(self) -> None:
        await self._scorer.aclose()

    def _ids(self, solution: str, task: Mapping[str, Any]) -> list[int]:
        asked = task.get("messages") or [{"role": "user", "content": question_of(task)}]
        text = self._tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": solution}], tokenize=False
        )
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _fill(self, data_source: str, solution: str, truth: Any, task: Mapping[str, Any]) -> str:
        return (self._prompt or "").format(
            data_source=data_source,
            solution_str=solution,
            ground_truth="" if truth is None else truth,
            question=question_of(task),
        )


class _Scorer(Protocol):
    """A reward model, wherever it is."""

    async def score(self, conversation: str | list[int]) -> float:
        """Return the last logit for a text, or for token ids.

        Raises:
            RewardCrashError: there is none.
        """

    async def wait_loaded(self) -> None:
        """Return once it can score."""

    async def aclose(self) -> None: ...


class _Server:
    """A model behind `/classify`."""

    def __init__(
        self, url: str, backoff_s: float, timeout_s: float, headers: Mapping[str, str] | None
    ) -> None:
        self._server = RewardServer(
            f"the reward model {url}", f"{url.rstrip('/')}/classify", backoff_s, timeout_s, headers
        )

    async def score(self, conversation: str | list[int]) -> float:
        field = "text" if isinstance(conversation, str) else "input_ids"
        answer = await self._server.post({field: conversation})
        try:
            return float(answer["embedding"][-1])
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise RewardCrashError(
                f"the reward model answered {answer!r:.200}; it should be "
                '{"embedding": [score]}, as a server with a classification head answers'
            ) from e

    async def wait_loaded(self) -> None:
        """Return at once: a server that loads its model is asked until it answers."""

    async def aclose(self) -> None:
        await self._server.aclose()


class _Head:
    """A model in this process and the one thread that computes with it."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path).expanduser().resolve()
        if not (self._folder / "config.json").is_file():
            raise ValueError(
                f"path is {path!r}, which has no config.json; give a model's directory"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")
        self._model: Any = None

    async def wait_loaded(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def score(self, conversation: str | list[int]) -> float:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._compute, conversation
        )

    async def aclose(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        if self._model is None:
            from transformers import AutoModelForSequenceClassification

            found = AutoModelForSequenceClassification.from_pretrained(self._folder, dtype="auto")
            self._model = found.eval().requires_grad_(False)

    def _compute(self, conversation: str | list[int]) -> float:
        import torch

        self._load()
        ids = conversation
        if isinstance(ids, str):
            ids = list(tokenizer_at(self._folder)(ids)["input_ids"])
        most = getattr(self._model.config, "max_position_embeddings", None)
        if not ids or (most and len(ids) > most):
            raise RewardCrashError(
                f"the conversation has {len(ids)} tokens for the reward model in {self._folder}; "
                f"it reads 1 to {most or 'any number'}"
            )
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if max(ids) >= vocabulary:
            raise RewardCrashError(
                f"the conversation has token id {max(ids)}, and the reward model in {self._folder} "
                f"knows {vocabulary}; set tokenizer to its own"
            )
        input_ids = torch.tensor([ids])
        out = self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        return float(out.logits[0, -1])
