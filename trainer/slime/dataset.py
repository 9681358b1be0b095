"""Prompts as slime's samples, in slime's order.

    rows ──► tasks ──► samples   prompt, label, metadata (with the row's `tools`)
                         │
      shuffle(epoch) ────┘       `random.Random(seed + epoch)`: the order of THUDM/slime 0.3.1

`Dataset` has the names of slime's class (`slime/utils/data.py`). A sample is made when it is asked
for, so that memory grows by some bytes a row only. Does not own how rows become tasks
(`trainer/data/`), or the position in an epoch (`data_source.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from stepwell.backends.slime.sample import sample_class
from stepwell.trainer.data.prompt_length import PromptMeter, load_tokenizer
from stepwell.trainer.data.tasks import Task, TaskSet, open_tasks
from stepwell.trainer.errors import ConfigError, DataError
from stepwell.trainer.slime.config import folder, prompt_data


class Dataset:
    """The prompts of slime's `--prompt-data`.

    Args:
        origin_samples: in the order of the file.
        seed: slime's `--rollout-seed`.
    """

    def __init__(self, origin_samples: Sequence[Any], seed: int) -> None:
        self.origin_samples = origin_samples
        """Samples in the order of the file."""
        self.samples = origin_samples
        """Samples in the order of the epoch."""
        self.epoch_id = -1
        """Epoch whose order `samples` has; -1: that of the file."""
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Put `samples` into the order of an epoch."""
        if self.epoch_id == new_epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        source = self.origin_samples
        if isinstance(source, _Samples):
            self.samples = source.in_order(order)
        else:  # somebody put samples of their own there
            self.samples = [source[i] for i in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def open_dataset(args: Any) -> Dataset | None:
    """Open the prompts that slime's arguments name; None with `--disable-rollout-global-dataset` or
    without `--prompt-data`. With `--dump-details` the tokenizer is saved into that folder.

    Raises:
        DataError: they cannot be read, or none is as short as `--rollout-max-prompt-len`.
        ConfigError: an argument needs a tokenizer, and `--hf-checkpoint` is not set.
    """
    named, model = prompt_data(args), folder(args, "hf_checkpoint")
    if named is None:
        return None
    config, rows = named
    templated, limit = args.apply_chat_template, args.rollout_max_prompt_len
    dump = folder(args, "dump_details")
    asked = {"apply_chat_template": templated, "rollout_max_prompt_len": limit is not None}
    if model is None and (needy := next((name for name, is_set in asked.items() if is_set), None)):
        raise ConfigError(
            f"{needy} is {getattr(args, needy)!r}, but there is no model whose tokenizer to use; "
            f"set --hf-checkpoint, or leave --{needy.replace('_', '-')} out"
        )
    tasks = open_tasks(config)
    numbers = range(len(tasks))[rows]
    if not numbers:
        raise DataError(f"prompt_data is {str(args.prompt_data)!r}, which has no rows; name others")
    if model is not None and dump is not None:
        load_tokenizer(model, "dump_details").save_pretrained(dump / "tokenizer")
    meter = None
    if model is not None and any(asked.values()):
        meter = PromptMeter(model, config.apply_chat_template_kwargs)
    samples = _Samples(tasks, _sample_of(meter if templated else None), numbers)
    if meter is not None and limit is not None:
        chosen = (tasks[i] for i in numbers)
        samples = samples.in_order(_short_enough(chosen, meter, templated, limit))
    return Dataset(samples, args.rollout_seed)


def _short_enough(
    tasks: Iterable[Task], meter: PromptMeter, templated: bool, limit: int
) -> list[int]:
    """Return the tasks, by number, whose prompt has at most `limit` tokens as it is sent: a string
    without a template as it stands, messages by the chat template."""
    texts = [
        task["question"] if "question" in task and not templated else meter.render(task)
        for task in tasks
    ]
    lengths = meter.count_texts(texts)
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if not kept:
        raise DataError(
            f"rollout_max_prompt_len is {limit}, and all {len(lengths)} prompts are longer (the "
            f"shortest has {min(lengths)} tokens); raise --rollout-max-prompt-len"
        )
    return kept


def _sample_of(template: PromptMeter | None) -> Callable[[Task], Any]:
    def make(task: Task) -> Any:
        prompt = task["question"] if "question" in task else task["messages"]
        tools = {"tools": task["tools"]} if "tools" in task else {}
        return sample_class()(
            prompt=prompt if template is None else template.render(task),
            label=task["answer"],
            metadata={**task["metadata"], **tools},
        )

    return make


class _Samples(Sequence[Any]):
    """Samples of the tasks `order`, made when they are asked for: no two share anything that may
    be changed."""

    def __init__(self, tasks: TaskSet, make: Callable[[Task], Any], order: Sequence[int]) -> None:
        self._tasks = tasks
        self._make = make
        self._order = order

    def in_order(self, order: Sequence[int]) -> _Samples:
        """These of the samples, in this order."""
        return _Samples(self._tasks, self._make, [self._order[i] for i in order])

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(self._tasks[i]) for i in self._order[index]]
        return self._make(self._tasks[self._order[index]])
