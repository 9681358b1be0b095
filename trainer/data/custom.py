"""This module takes prompts from a class of the user's, so that a data set written for verl
(`data.custom_cls`) is trained on as it is.

    cls(data_files=…, tokenizer=…, config=…) ──► dataset[i] ──► a row: raw_prompt, data_source,
                                                    reward_model.ground_truth, extra_info

The call and the rows are verl's (volcengine/verl, `create_rl_dataset` and `RLHFDataset`). Two keys
name the prompt: `prompt_key` the column that the class reads (verl's pops it from the row), and
`returned_prompt_key` what it gives. What of a row becomes a task is in the source's keys; the rest
(tensors, dummies) is left. Does not own what a row means (`tasks.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stepwell.datapool.dotted import resolve
from stepwell.datapool.own_loop import ENDS
from stepwell.trainer.config import CustomSource
from stepwell.trainer.data.columns import Columns, DataRow, lookup, refuse_media
from stepwell.trainer.errors import DataError

RAW_PROMPT = "raw_prompt"
"""Key of the messages in rows of verl's class."""


class CustomRows:
    """The rows of a dataset object, by index.

    Args:
        files: on this machine.
        tokenizer: of the model; None: there is none to give.

    Raises:
        DataError: the class cannot be found or made, or is no map-style data set.
    """

    def __init__(self, config: CustomSource, files: Sequence[Path], tokenizer: Any) -> None:
        self._cls = config.cls
        self._prompt_key = config.prompt_key
        self._returned = config.returned_prompt_key
        self._image_key = config.image_key
        self._columns = Columns(config)
        made, longest = _find(config.cls), config.max_prompt_tokens
        given = {
            "data_files": [str(file) for file in files],
            "tokenizer": tokenizer,
            "processor": None,
            "config": OmegaConf.create(
                {
                    "prompt_key": config.prompt_key,
                    **({} if longest is None else {"max_prompt_length": longest}),
                    # Without a length verl's class would filter by its own, 1024 tokens.
                    "filter_overlong_prompts": longest is not None
                    and config.filter_overlong_prompts,
                    "truncation": config.truncation,
                    "return_raw_chat": True,
                    "apply_chat_template_kwargs": config.apply_chat_template_kwargs,
                    "shuffle": config.shuffle,
                    "seed": config.shuffle_seed,
                    **config.options,
                }
            ),
            "max_samples": -1,
        }
        taken = inspect.signature(made).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in taken):
            given = {p.name: given[p.name] for p in taken if p.name in given}
        try:
            self._dataset = made(**given)
        except ENDS:
            raise
        except BaseException as e:  # foreign code
            raise DataError(
                f"cls is {config.cls!r}, which cannot be made with {', '.join(given)} "
                f"({type(e).__name__}: {e!s:.300})"
            ) from e
        if not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise DataError(
                f"cls is {config.cls!r}, which has no __len__ and __getitem__; write a map-style "
                "torch.utils.data.Dataset: rows are taken by index, in an order of each epoch"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> DataRow:
        try:
            stored = self._dataset[index]
        except ENDS:
            raise
        except BaseException as e:  # foreign code
            raise DataError(f"{self.where(index)}: {type(e).__name__}: {e!s:.300}") from e
        if not isinstance(stored, Mapping):
            raise DataError(
                f"{self.where(index)} is a {type(stored).__name__}; __getitem__ returns a dict"
            )
        refuse_media(stored, self.where(index), self._image_key)
        return self._columns.read({**stored, self._prompt_key: self._prompt(stored, index)})

    def _prompt(self, row: Mapping[str, Any], index: int) -> Any:
        """Prompt of a row.

        Raises:
            DataError: it has none.
        """
        keys = (RAW_PROMPT, self._prompt_key) if self._returned is None else (self._returned,)
        for key in keys:
            if (prompt := lookup(row, key)) is not None:
                return prompt
        raise DataError(
            f"{self.where(index)} has no {' and no '.join(map(repr, keys))}; set "
            f"returned_prompt_key to the key that holds the prompt (it has {', '.join(row)})"
        )

    def __iter__(self) -> Iterator[DataRow]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        """Names the row in messages."""
        return f"{self._cls} row {index}"

    def number(self, index: int) -> int:
        return index


def _find(path: str) -> Any:
    try:
        found = resolve(path)
    except Exception as e:  # any error of foreign code at import
        raise DataError(
            f"cls is {path!r}, which cannot be loaded ({type(e).__name__}: {e!s:.300}); name it as "
            "path/to/file.py:Name or package.module:Name"
        ) from e
    if not callable(found):
        raise DataError(f"cls is {path!r}, a {type(found).__name__}; name a class")
    return found
