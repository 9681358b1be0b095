"""Rows of `data.sft` as Steps: conversations that somebody has written, with the model's chat
template.

Owns what a row is, and why it cannot be trained. Does not own masks (`backends/masks`) or order and
epochs (`source.py`). Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from stepwell.backends.errors import MaskError
from stepwell.backends.masks import mask_generator, to_steps
from stepwell.backends.masks.base import check_messages
from stepwell.datapool.types import Step
from stepwell.trainer.config import SftConfig, TableConfig
from stepwell.trainer.data.source import PromptSource
from stepwell.trainer.data.tasks import Task
from stepwell.trainer.errors import DataError
from stepwell.trainer.tokenizers import tokenizer_at


def open_conversations(data: TableConfig, config: SftConfig, tokenizer_path: Path) -> PromptSource:
    """The conversations of `data`, in the order of training.

    Raises:
        DataError: they cannot be read, a row is none, or the chat template has no such mask.
    """
    source = PromptSource(data, tokenizer_path=tokenizer_path)
    for task in source:
        _named(task)
    Conversations(data, config, tokenizer_path).steps(next(iter(source)), "check")
    return source


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

    def steps(self, task: Task, prompt_uid: str) -> list[Step]:
        """A Step for each message of the assistant that has loss.

        Raises:
            DataError: there is none, or the template cannot show the conversation.
        """
        messages = _named(task)
        try:
            steps = to_steps(
                self._masks,
                messages,
                task.get("tools"),
                trajectory_uid=prompt_uid,
                prompt_uid=prompt_uid,
            )
        except MaskError as e:
            raise _refused(task, str(e)) from e
        return steps


def _named(task: Task) -> list[dict[str, object]]:
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
