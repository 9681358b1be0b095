"""`stepwell config --keys` tells every key's type, bound, default and meaning from its section."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepwell
from stepwell.config.keys import all_keys, keys, show_keys
from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError


def test_every_key_has_a_type_and_a_meaning() -> None:
    assert not [key.name for key in keys() if not key.meaning]
    assert not [key.name for key in keys() if not key.type]


def test_a_key_is_shown_with_type_bound_default_and_meaning() -> None:
    first, *meaning = show_keys("rollout.n", width=80).split("\n\n")[0].splitlines()
    assert first == "rollout.n: int ≥ 1, default 8"
    assert meaning[0].startswith("    Rollouts per prompt")


def test_a_pattern_is_a_part_of_the_name_or_a_glob() -> None:
    def named(pattern: str) -> list[str]:
        blocks = show_keys(pattern, width=80).split("\n\n")
        return [block.partition(":")[0].partition(" ")[0] for block in blocks]

    assert "rollout.max_outstanding_groups" in named("outstanding")
    assert named("run.*") == ["run.name", "run.dir", "run.seed", "run.resume"]
    assert named("*.total_steps") == ["trainer.total_steps"]


def test_a_key_that_only_some_kinds_have_names_them() -> None:
    shown = show_keys("data.train.prompt_key", width=120)
    assert "kind jsonl, parquet or huggingface" in shown
    assert "kind" not in show_keys("data.train.shuffle", width=120).splitlines()[0]


def test_a_kind_is_told_by_its_whole_first_sentence() -> None:
    (kind,) = [key for key in keys() if key.name == "data.train.kind"]
    assert "as verl's `data.custom_cls`: a map-style `torch.utils.data.Dataset`" in kind.meaning
    assert "which `rollout.harness` works on" in kind.meaning
    assert kind.meaning.endswith("environment (0.4), in a Python of its own.")


def test_a_configuration_shows_its_values_in_place_of_defaults() -> None:
    config = load_config("quickstart", ["rollout.n=5"])
    assert "rollout.n: int ≥ 1, 5 (default 8)" in show_keys("rollout.n", config, width=80)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    shown = show_keys("*", load_config("quickstart"), width=width)
    assert not [line for line in shown.splitlines() if len(line) > width]
    assert len(shown) > 10_000


def test_a_pattern_without_a_key_says_what_is_near_or_what_another_framework_calls_so() -> None:
    with pytest.raises(ConfigError, match=r"it is TRL's name for rollout\.n"):
        show_keys("num_generations", width=80)
    with pytest.raises(ConfigError, match=r"no key is like 'rollout.nn'; did you mean 'rollout.n'"):
        show_keys("rollout.nn", width=80)


def test_the_command_prints_keys_without_a_configuration() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "config", "--keys", "total_steps"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = "trainer.total_steps: int ≥ 1 or null, default 100\n    Optimizer steps"
    assert done.stdout.startswith(said)


NO_SECTIONS = frozenset(
    {"base_model", "environment", "oc", "remote", "sampling_params", "tool_choice", "verifier"}
)
"""First words of names that are no keys: OmegaConf's, of requests, modules, peft's and Harbor's."""
FIRST = {name.partition(".")[0] for name in all_keys()}
LAST = {name.rpartition(".")[2] for name in all_keys()}
FILE = re.compile(r"\.(py|log|json|lock|safetensors|acked)$")


def _texts(source: str) -> Iterator[str]:
    """The strings of a module, docstrings left out."""
    tree = ast.parse(source)
    docs = {id(e.value) for e in ast.walk(tree) if isinstance(e, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def _keys_in(text: str) -> set[str]:
    """Words of `text` that look like keys: they begin with a section, or end as a key does."""
    text = re.sub(r"\{[^{}]*\}", "", text)  # of `str.format`: code, no key
    words = re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+(?![\w(/])", text)
    return {
        word
        for word in words
        if (word.partition(".")[0] in FIRST or word.rpartition(".")[2] in LAST)
        and word.partition(".")[0] not in NO_SECTIONS
        and not (FILE.search(word) or word.startswith("stepwell."))
    }


@pytest.mark.parametrize("room", ["datapool", "gateway", "backends", "trainer", "stepwell"])
def test_every_key_that_a_message_names_exists(room: str) -> None:
    known = {part for name in all_keys() for part in _parts_of(name)}
    missing = {
        f"{path.name}: {key}"
        for path in sorted(Path(stepwell.__file__).parents[1].joinpath(room).rglob("*.py"))
        if room != "stepwell" or path.parent.name == "stepwell"
        for text in _texts(path.read_text())
        for key in _keys_in(text)
        if key not in known
    }
    assert not missing


def _parts_of(name: str) -> Iterator[str]:
    """A key, the sections that it is in, and what it is called inside of one."""
    parts = name.split(".")
    for i in range(len(parts)):
        for k in range(i + 1, len(parts) + 1):
            yield ".".join(parts[i:k])
