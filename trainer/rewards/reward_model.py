"""A trained reward model: a sequence-classification head that reads the conversation and gives its
score.

    task's messages + answer ──chat template of the reward model──► token ids
                                                                      │ POST /classify
    score ◄── a server at `url`, or one that is started for `path` ◄──┘

The endpoint is SGLang's `/classify` (a server launched with `--is-embedding`); the embedded engine
has it, too. Owns what the model reads. Does not own the engine's process
(`backends/engines/supervisor.py`), or how often it is asked (`server.py`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.trainer.errors import RewardCrashError
from stepwell.trainer.rewards.base import question_of
from stepwell.trainer.rewards.server import RewardServer


class RewardModel:
    """The last logit of the head, as it is: its only one, or, of several, the last class's.

    Args:
        url: of a server, e.g. http://127.0.0.1:30000.
        path: in place of it, the model's directory: an engine is started with it, restarted when
            it fails, and ended with the run.
        engine: how, as the section `engine`; e.g. {kind: sglang, extra_args: [--is-embedding]}.
            By default the embedded one.
        tokenizer: of the reward model, whose chat template renders the task's messages and the
            answer; `path` by default.
        prompt: in place of the chat template, formatted with {question}, {solution_str},
            {ground_truth} and {data_source}; the server tokenises it.
        backoff_s, timeout_s, headers: as `RewardServer`; all tries together have
            `rollout.reward.timeout_s`, the engine's start has its own `startup_timeout_s`.
    """

    def __init__(
        self,
        url: str | None = None,
        path: str | None = None,
        engine: Mapping[str, Any] | None = None,
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
        self._asking = (backoff_s, timeout_s, headers)
        self._server = None if url is None else self._at(url)
        self._config = None if path is None else _engine(path, engine or {})
        self._starting: asyncio.Task[None] | None = None
        self._supervisor: Supervisor | None = None
        if prompt is not None:
            self._fill("", "", None, {})  # an unknown name in braces is found now
        elif (tokenizer := tokenizer or path) is None:
            raise ValueError(
                "tokenizer and prompt are missing; give the reward model's tokenizer, whose chat "
                "template renders the conversation, or a prompt"
            )
        else:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
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
            RewardCrashError: the server refuses the request, or answers no score.
            EngineStartError: the engine cannot be started.
        """
        await self.start_serving()
        if self._prompt is not None:
            text = self._fill(data_source, solution_str, ground_truth, extra_info)
            body: dict[str, Any] = {"text": text}
        else:
            body = {"input_ids": await asyncio.to_thread(self._ids, solution_str, extra_info)}
        if self._server is None:
            raise RewardCrashError("the reward model was closed")
        answer = await self._server.post(body)
        try:
            return float(answer["embedding"][-1])
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise RewardCrashError(
                f"the reward model answered {answer!r:.200}; it should be "
                '{"embedding": [score]}, as a server with a classification head answers'
            ) from e

    async def start_serving(self) -> None:
        """Returns once the model is served; starts it at the first call.

        Raises:
            EngineStartError: it cannot be.
        """
        if self._config is None:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(self._config))
        await asyncio.shield(self._starting)

    async def aclose(self) -> None:
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
            self._logs.cleanup()
        if self._server is not None:
            await self._server.aclose()

    async def _start(self, config: EngineConfig) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="stepwell-reward-model-")
        self._supervisor = Supervisor(config, self._logs.name)
        self._server = self._at(await asyncio.to_thread(self._supervisor.start))

    def _at(self, url: str) -> RewardServer:
        return RewardServer(f"the reward model {url}", f"{url.rstrip('/')}/classify", *self._asking)

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


def _engine(path: str, section: Mapping[str, Any]) -> EngineConfig:
    folder = Path(path).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ValueError(f"path is {path!r}, which has no config.json; give a model's directory")
    return EngineConfig.model_validate({"model_path": folder, **section})
