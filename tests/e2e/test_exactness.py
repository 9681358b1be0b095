"""For every Step of a run: its ids are the engine's, its log-probs are the policy's, and its prompt
strictly extends its parent."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.backends.torch.backend import TorchBackend
from stepwell.cluster.parts import start_cluster
from stepwell.config.run import RunConfig
from stepwell.datapool.types import Step, VersionSpan
from stepwell.run.checks import training_prompts
from stepwell.run.trainer import build_trainer
from stepwell.trainer.recording import load_recording, recordings
from tests.e2e.conftest import ATTACHED, ROOT, EngineRecorder, engine, small_config

pytestmark = pytest.mark.e2e

STEPS, MOST_STEPS = 4, 60
"""Optimizer steps: of them, and as many more as an engine takes that loads slowly until a batch is
trained which an update has sampled."""


@dataclass
class Run:
    """A run as seen from outside: the steps that were trained on, and the engine's own answers."""

    config: RunConfig
    steps: list[Step]
    answers: list[tuple[list[int], dict[str, Any]]]
    records: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run with an update after each step, through a recording proxy before the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return asyncio.run(recorded_run(tmp_path_factory.mktemp("exactness")))


async def recorded_run(folder: Path) -> Run:
    async with engine(folder) as url, EngineRecorder(url).serving() as recorder:
        config = small_config(
            folder,
            "trainer.keep_weights=100",
            "async_training.trigger_parameter_sync_step=1",
            f"engine.kind={ATTACHED}",
            f"engine.urls=[{recorder.url}]",
            f"trainer.save_debug_rollout_data={folder / 'batches'}",
        )
        async with start_cluster(config) as cluster:
            with build_trainer(config, cluster, training_prompts(config)) as trainer:
                records = []
                async with aclosing(trainer.train(MOST_STEPS)) as training:
                    async for record in training:
                        records.append(record)
                        steps = _recorded_steps(folder)
                        if len(records) >= STEPS and any(s.policy_version for s in steps):
                            break
        return Run(config, steps, recorder.answers, records)


def _recorded_steps(folder: Path) -> list[Step]:
    batches = [load_recording(path) for _, path in recordings(str(folder / "batches"))]
    return [s for batch in batches for group in batch.groups for s in group.steps]


def test_a_run_has_steps_of_several_versions(run: Run) -> None:
    assert STEPS <= len(run.records) <= MOST_STEPS
    assert len({s.policy_version for s in run.steps}) > 1
    assert any(s.parent_index is not None for s in run.steps)


def test_stored_ids_and_log_probs_are_the_engines_own(run: Run) -> None:
    said = {
        (
            tuple(prompt),
            tuple(answer["output_ids"]),
            tuple(np.float32([e[0] for e in answer["meta_info"]["output_token_logprobs"]])),
        )
        for prompt, answer in run.answers
    }
    assert run.steps
    for step in run.steps:
        assert step.rollout_log_probs is not None
        assert len(step.rollout_log_probs) == len(step.response_ids)
        stored = (step.prompt_ids, step.response_ids, step.rollout_log_probs)
        assert tuple(tuple(column) for column in stored) in said


def test_every_childs_prompt_strictly_extends_its_parent(run: Run) -> None:
    by_index = {(s.trajectory_uid, s.step_index): s for s in run.steps}
    for step in run.steps:
        if step.parent_index is None:
            continue
        parent = by_index[step.trajectory_uid, step.parent_index]
        prefix = np.concatenate([parent.prompt_ids, parent.response_ids])
        assert len(step.prompt_ids) > len(prefix)
        assert np.array_equal(step.prompt_ids[: len(prefix)], prefix)


def test_a_linear_conversation_is_one_branch(run: Run) -> None:
    for step in run.steps:
        assert step.parent_index == (step.step_index - 1 if step.step_index else None)


def test_log_probs_recomputed_at_the_same_version_agree(run: Run) -> None:
    spans = [
        (span.version, step, span.start, span.end) for step in run.steps for span in _spans(step)
    ]
    for version in sorted({v for v, *_ in spans}):
        path = run.config.run.dir / "weights" / f"v{version}" if version else run.config.model.path
        backend = TorchBackend(run.config.backend, path)
        mine = [(step, start, end) for v, step, start, end in spans if v == version]
        batch = backend.convert([replace(step) for step, _, _ in mine])
        log_probs = backend.compute_log_probs(batch).numpy()
        for i, (step, start, end) in enumerate(mine):
            first = int(batch.offsets[i])
            again = log_probs[first + start : first + end]
            assert step.rollout_log_probs is not None
            assert np.abs(again - step.rollout_log_probs[start:end]).max() <= 1e-3


def _spans(step: Step) -> list[VersionSpan]:
    whole = VersionSpan(step.policy_version, 0, len(step.response_ids))
    return list(step.version_spans) or [whole]
