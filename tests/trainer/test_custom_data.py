"""Prompts from a class of the user's, as verl documents it: `data.custom_cls.path` and `.name`
(volcengine/verl, docs/examples/config.rst; `create_rl_dataset` in verl/trainer/main_ppo.py)."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from stepwell.trainer.config import CustomSource, DataConfig
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import DataError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

# A class as verl's users write one: rows of its own, by verl's arguments.
GAMES = """
    import numpy as np
    import torch
    from torch.utils.data import Dataset

    class GameDataset(Dataset):
        def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
            self.words = [w for f in data_files for w in open(f).read().split()]
            self.tokenizer, self.config = tokenizer, config
            assert config.get("truncation", "error") == "error"
            assert processor is None and max_samples == -1

        def __len__(self):
            return len(self.words)

        def __getitem__(self, item):
            text = f"{self.config.hint} {self.words[item]}?"
            ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
            return {
                "prompt": np.array([{"role": "user", "content": text}], dtype=object),
                "raw_prompt_ids": ids,
                "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
                "data_source": "games",
                "ability": "guess",
                "reward_model": {"style": "rule", "ground_truth": np.int64(item)},
                "extra_info": {"index": item, "split": "train", "level": np.float32(0.5)},
            }

    class Verl(GameDataset):
        # Pops the prompt, as verl's class of June 2025 does.

        def __init__(self, data_files, tokenizer, config):
            super().__init__(data_files, tokenizer, config)
            self.column = config.get("prompt_key", "prompt")
            self.length = config.get("max_prompt_length", 1024)
            self.raw_chat = config.get("return_raw_chat", False)
            self.full_prompt = config.get("return_full_prompt", False)
            assert config.filter_overlong_prompts == ("max_prompt_length" in config)

        def __getitem__(self, item):
            row = super().__getitem__(item)
            row[self.column] = row.pop("prompt").tolist()
            messages = row.pop(self.column)
            if self.raw_chat:
                row["raw_prompt"] = messages
            if self.full_prompt:
                row["full_prompts"] = f"<user>{messages[0]['content']}<assistant>"
            row["length"] = self.length
            return row

    class Minimal:
        def __len__(self):
            return 2

        def __getitem__(self, item):
            return {"prompt": f"q{item}", "reward_model": {"ground_truth": str(item)}}

    class Images(Minimal):
        def __getitem__(self, item):
            return super().__getitem__(item) | {"multi_modal_data": {"image": ["x"]}}

    class Stream:
        def __iter__(self):
            yield {}

    class Broken(Minimal):
        def __getitem__(self, item):
            if item == 1:
                raise KeyError("answer")
            return super().__getitem__(item)

    class Pairs(Minimal):
        def __getitem__(self, item):
            return "question", "answer"

    class Fails(Minimal):
        def __init__(self):
            raise ValueError("no data today")

    number = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_dataset.py"
    path.write_text(dedent(GAMES))
    return path


def source(cls: str, **fields: Any) -> CustomSource:
    return CustomSource.model_validate({"kind": "custom", "cls": cls, "shuffle": False, **fields})


def test_verls_rows_are_tasks(module: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.txt" for name in ("train", "more")]
    for file in files:
        file.write_text(f"{file.stem}1 {file.stem}2")
    config = source(f"{module}:GameDataset", path=files, options={"hint": "guess"})
    prompts = PromptSource(config, tokenizer_path=MODEL)
    tasks = [prompts.next() for _ in range(len(prompts))]
    assert len(tasks) == 4
    assert tasks[3] == {
        "instance_id": "GameDataset-3",
        "data_source": "games",
        "messages": [{"role": "user", "content": "guess more2?"}],
        "answer": 3,
        "metadata": {"index": 3, "split": "train", "level": 0.5},
    }


def said(module: Path, file: Path, **fields: Any) -> list[dict[str, Any]]:
    fields["options"] = {"hint": "guess", **fields.get("options", {})}
    config = source(f"{module}:Verl", path=[file], **fields)
    return PromptSource(config, tokenizer_path=MODEL).all()


def test_a_class_that_takes_the_prompt_out_of_the_row_gives_it_under_another_key(
    module: Path, tmp_path: Path
) -> None:
    """`prompt_key` is the column that verl's class reads; what it gives is `raw_prompt`."""
    file = tmp_path / "words.txt"
    file.write_text("cat")
    messages = [{"role": "user", "content": "guess cat?"}]
    assert said(module, file)[0]["messages"] == messages
    assert said(module, file, prompt_key="chat")[0]["messages"] == messages
    assert said(module, file, max_prompt_tokens=99)[0]["messages"] == messages
    (task,) = said(
        module, file, returned_prompt_key="full_prompts", options={"return_full_prompt": True}
    )
    assert task["question"] == "<user>guess cat?<assistant>"
    with pytest.raises(DataError, match="row 0 has no 'raw_prompt' and no 'prompt'; set returned_"):
        said(module, file, options={"return_raw_chat": False})
    with pytest.raises(DataError, match=r"row 0 has no 'text'; set returned_.*it has .*raw_prompt"):
        said(module, file, returned_prompt_key="text")


def test_a_class_is_given_what_it_takes_and_its_prompts_are_measured(module: Path) -> None:
    config = source(f"{module}:Minimal", max_prompt_tokens=1000)
    prompts = PromptSource(config, tokenizer_path=MODEL)
    assert [t["question"] for t in prompts.all()] == ["q0", "q1"]
    assert [t["answer"] for t in prompts.all()] == ["0", "1"]
    with pytest.raises(DataError, match="all 2 prompts are longer than max_prompt_tokens = 1"):
        PromptSource(source(f"{module}:Minimal", max_prompt_tokens=1), tokenizer_path=MODEL)


def test_a_run_that_goes_on_finds_its_place(module: Path) -> None:
    first = PromptSource(source(f"{module}:Minimal"))
    first.next()
    again = PromptSource(source(f"{module}:Minimal"))
    again.load_state_dict(first.state_dict())
    assert again.next() == first.next()


def test_the_class_alone_is_a_source(module: Path) -> None:
    config = DataConfig.model_validate({"train": f"{module}:Minimal"})
    assert isinstance(config.train, CustomSource)
    assert len(PromptSource(config.train)) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Images", "row 0 has multi_modal_data; videos and sounds are not trained"),
        ("Stream", "has no __len__ and __getitem__; write a map-style"),
        ("Broken", "row 1: KeyError: 'answer'"),
        ("Pairs", "row 0 is a tuple; __getitem__ returns a dict"),
        ("Fails", r"cannot be made with  \(ValueError: no data today\)"),
        ("Absent", "has no 'Absent'.*; name it as path/to/file.py:Name"),
        ("number", "a int; name a class"),
    ],
)
def test_a_class_that_is_no_data_set_is_refused_by_its_name(
    module: Path, name: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        PromptSource(source(f"{module}:{name}"))
    assert f"my_dataset.py:{name}" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*none\.py"):
        PromptSource(source(f"{tmp_path}/none.py:X"))
