"""Rows of `data.sft` as Steps: conversations that somebody has written, with the model's chat
template.

Owns what a row is, and why it cannot be trained. Does not own masks (`backends/masks`) or order and
epochs (`source.py`). Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stepwell.backends.errors import MaskError, PictureError
from stepwell.backends.masks import mask_generator, to_steps
from stepwell.backends.masks.base import check_messages
from stepwell.backends.pictures import PictureProcessor, no_pictures
from stepwell.datapool.types import Step
from stepwell.trainer.config import SftConfig, TableConfig
from stepwell.trainer.data.images import is_picture, picture_bytes
from stepwell.trainer.data.source import PromptSource
from stepwell.trainer.data.tasks import Task
from stepwell.trainer.errors import DataError
from stepwell.trainer.tokenizers import tokenizer_at

T = TypeVar("T")


def open_conversations(data: TableConfig, config: SftConfig, tokenizer_path: Path) -> PromptSource:
    """The conversations of `data`, in the order of training.

    Raises:
        DataError: they cannot be read, a row is none, or the chat template has no such mask.
    """
    source = PromptSource(data, tokenizer_path=tokenizer_path)
    conversations = Conversations(data, config, tokenizer_path)
    for task in source:
        conversations.check(task)
    conversations.written(next(iter(source)), "check")
    return source


class Written(NamedTuple):
    """A conversation as Steps."""

    steps: list[Step]
    pictures: Mapping[str, bytes]
    """PNG by digest, of those that the steps name."""


class Conversations:
    """Rows of `data.sft` as Steps.

    Raises:
        DataError: the mask generator is not for the model's chat template.
    """

    def __init__(self, data: TableConfig, config: SftConfig, tokenizer_path: Path) -> None:
        tokenizer = tokenizer_at(tokenizer_path)
        kwargs = data.apply_chat_template_kwargs
        try:
            self._masks = mask_generator(config.loss_mask_type, tokenizer, kwargs)
        except MaskError as e:
            raise DataError(
                f"algorithm.sft.loss_mask_type is {config.loss_mask_type!r}: {e}"
            ) from e
        self._vision = PictureProcessor.of(tokenizer_path)
        self._no_pictures = no_pictures(tokenizer_path)

    def check(self, task: Task) -> None:
        """
        Raises:
            DataError: it cannot be trained, as far as its messages and the sizes of its pictures
                tell.
        """
        self._read(task, _named(task), lambda vision, data: vision.n_tokens(data))

    def written(self, task: Task, prompt_uid: str) -> Written:
        """A Step for each message of the assistant that has loss, and its pictures.

        Raises:
            DataError: there is none, or the template cannot show the conversation, or a picture
                cannot be read.
        """
        messages = _named(task)
        pictures = self._read(task, messages, lambda vision, data: vision.canonical(data))
        try:
            steps = to_steps(
                self._masks,
                [_for_template(message) for message in messages],
                task.get("tools"),
                trajectory_uid=prompt_uid,
                prompt_uid=prompt_uid,
                vision=self._vision,
                pictures=pictures,
            )
        except MaskError as e:
            raise _refused(task, str(e)) from e
        named = {picture.digest for step in steps for picture in step.pictures}
        pngs = {picture.digest: picture.png for own in pictures for picture in own}
        return Written(steps, {digest: pngs[digest] for digest in named})

    def _read(
        self,
        task: Task,
        messages: Sequence[Mapping[str, Any]],
        read: Callable[[PictureProcessor, bytes], T],
    ) -> list[list[T]]:
        """Return the results of `read` for the pictures of each message."""
        found: list[list[T]] = []
        for i, message in enumerate(messages):
            found.append([])
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if not is_picture(part):
                    continue
                if self._vision is None:
                    raise _refused(task, f"messages[{i}] has a picture, but {self._no_pictures}")
                try:
                    found[-1].append(read(self._vision, picture_bytes(part)))
                except PictureError as e:
                    raise _refused(task, f"messages[{i}]: {e}") from e
        return found


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the gateway gives it to templates: without the bytes of its pictures."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if is_picture(p) else p for p in content]}


def _named(task: Task) -> list[dict[str, Any]]:
    """The messages of a task, if some of them can be trained."""
    messages = task.get("messages")
    if messages is None:
        raise _refused(task, "it is a question alone; prompt_key names a list of messages")
    try:
        if not any(check_messages(messages).values()):
            raise MaskError("no message of the assistant has loss: step_loss_mask is 0 on all")
    except MaskError as e:
        raise _refused(task, str(e)) from e
    return list(messages)


def _refused(task: Task, why: str) -> DataError:
    return DataError(
        f"data.sft: conversation {task['instance_id']!r} cannot be trained: {why}; mend it, or "
        "name it in data.sft.skip_instance_ids"
    )
