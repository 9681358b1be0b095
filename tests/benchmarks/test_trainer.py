"""The trainer bench: its workload, its forms' agreement, its report."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trainer import QUICK, REACH, RIVAL, run
from benchmarks.trainer.forms import make_form
from benchmarks.trainer.memory import peak_memory
from benchmarks.trainer.trl_forms import is_installed
from benchmarks.trainer.workload import FULL, Shape, groups, logical_tokens, make_model
from stepwell.trainer.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    assert make_model("tiny", path) == 512
    return path


def test_the_batch_is_the_one_that_the_bounds_are_stated_for() -> None:
    (steps, *_) = batches = groups(Shape(prompts=2), 512)
    assert [len(b) for b in batches] == [8 * 4] * 2
    assert [len(s.prompt_ids) for s in steps[:4]] == [256, 400, 544, 688]
    assert {len(s.response_ids) for s in steps} == {48}
    assert FULL.longest == max(s.n_tokens for s in steps) == 736
    assert logical_tokens(steps) == 8 * (304 + 448 + 592 + 736)
    for before, after in pairwise(steps[:4]):
        begun = np.concatenate([before.prompt_ids, before.response_ids])
        assert after.prompt_ids[: len(begun)].tolist() == begun.tolist()


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "merged",
        "tree",
        *(
            pytest.param(
                name,
                marks=pytest.mark.skipif(not is_installed(), reason="TRL is not installed"),
            )
            for name in ("trl", "trl-merged")
        ),
    ],
)
def test_every_form_has_the_gradient_of_the_plain_loop(name: str, folder: Path) -> None:
    """The bench compares the speed of the same work, so every form must do it."""
    (steps,) = groups(QUICK, 512)
    norm = make_form("plain", folder).step(steps)
    assert norm > 1e-2
    assert make_form(name, folder).step(steps) == pytest.approx(norm, rel=1e-4)


def test_the_tree_computes_a_prompt_once_and_a_history_once(folder: Path) -> None:
    (steps,) = groups(QUICK, 512)
    computed = {}
    for name in ("plain", "merged", "tree"):
        form = make_form(name, folder)
        form.step(steps)
        computed[name] = form.computed
    # Two rollouts of two steps; a row of 56 tokens, whose last one is not fed.
    assert computed == {"plain": 4 * 56, "merged": 2 * 55, "tree": 32 + 2 * 23}


@pytest.mark.long
async def test_peak_memory_is_that_of_a_process_of_its_own(folder: Path) -> None:
    peak = await peak_memory("tree", folder, QUICK, 512)
    assert 0 < peak.before_mb < peak.peak_mb
    with pytest.raises(RuntimeError, match="process of form 'nonsense' ended with 1"):
        await peak_memory("nonsense", folder, QUICK, 512)


@pytest.mark.long
def test_a_quick_run_measures_everything_and_bounds_no_time() -> None:
    result = asyncio.run(run(quick=True, only=["equality", "tiny"]))
    assert result.checks == {}
    assert result.figures["gradient_difference_max"] < 1e-5
    table = {row["form"]: row for row in result.figures["tiny: logical tokens/s"]}
    assert table.keys() >= {"plain", *REACH}
    assert all(row["tokens/s"] > 0 for row in table.values())
    assert {f"tiny_{name}_over_plain" for name in REACH} <= result.figures.keys()
    if is_installed():
        assert {f"tiny_{a}_over_{b}" for a, b in RIVAL.items()} <= result.figures.keys()
    else:
        assert "pip install" in result.figures["trl, not installed"]


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="only is 'huge'; choose from equality, tiny, 29M"):
        asyncio.run(run(only=["huge"]))
