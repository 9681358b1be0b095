"""Whole samples of groups, for functions and files of slime's form.

    Steps ──`backends/slime/samples.py`──► tokens, mask, log-probs, reward, status, versions
    task, tokenizer ──────────────────────► prompt, response, label, metadata

What is trained needs no text, so the backend leaves it out; a filter or a reader wants it. Does not
own which token is trained in which sample (`backends/slime/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.backends.slime.sample import SAMPLE, as_slime, put_back
from stepwell.backends.slime.samples import Samples, not_trained, rollouts_of, to_samples
from stepwell.datapool.types import Group, mapping_in
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.trajectory_metrics import task_of


class WholeSamples:
    """Makes samples with texts; see the module's docstring.

    Args:
        tokenizer_path: of the model that sampled.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        self._tokenizer_path = tokenizer_path

    def by_branch(self, groups: Sequence[Group]) -> Samples:
        """Return samples by group, by trajectory, by branch; `group_index` is the group's place.

        Raises:
            BatchError: as `to_samples`: a trajectory without a reward, or `multi_modal_data`.
        """
        made = to_samples(groups, inputs=not_trained).samples
        for group, rollouts in zip(groups, made, strict=True):
            task = task_of(group)
            for trajectory, samples in zip(rollouts_of(group), rollouts, strict=True):
                for sample in samples:
                    cut = len(sample.tokens) - sample.response_length
                    sample.prompt = _prompt(task) or self._text(sample.tokens[:cut])
                    sample.response = self._text(sample.tokens[cut:])
                    sample.label = task.get("answer")
                    sample.metadata = {**mapping_in(task, "metadata"), **sample.metadata}
                put_back(samples[-1], mapping_in(trajectory.metadata, SAMPLE))
        return made

    def by_trajectory(self, groups: Sequence[Group]) -> list[list[Any]]:
        """Return one sample per trajectory, by group: of several branches the last. slime's own
        class where slime is installed. Raises as `by_branch`."""
        return [[as_slime(rollout[-1]) for rollout in group] for group in self.by_branch(groups)]

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included, as slime does by default."""
        return str(tokenizer_at(self._tokenizer_path).decode(ids))


def _prompt(task: Mapping[str, Any]) -> Any:
    return task.get("question") or task.get("messages")
