"""A training backend for a trainer in any language: batches as files of JSON lines.

backend = build_backend("jsonl", "batches")
backend.convert(lease.steps)      # batches/<hash of prompt_uid>.jsonl, a line per sequence
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stepwell import Step, TokenRow, TrainingBackend, build_rows


class JsonLines(TrainingBackend):
    """Writes each prompt's group as a file of JSON lines, for a trainer outside Python."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def convert(self, steps: list[Step]) -> list[Path]:
        """A file per prompt_uid, complete when it appears; a group that is delivered again replaces
        its own. A trajectory with branches has several lines and is still one sample."""
        rewards: dict[str, float] = {}
        for step in steps:
            if step.reward is not None:
                rewards[step.trajectory_uid] = rewards.get(step.trajectory_uid, 0.0) + step.reward
        files: dict[str, list[str]] = {}
        for row in build_rows(steps, "merged"):
            first = steps[row.steps[0]]
            line = _line(row, steps) | {"reward": rewards.get(first.trajectory_uid)}
            files.setdefault(first.prompt_uid, []).append(json.dumps(line) + "\n")
        return [self._write(prompt_uid, lines) for prompt_uid, lines in files.items()]

    def _write(self, prompt_uid: str, lines: list[str]) -> Path:
        name = hashlib.sha256(prompt_uid.encode()).hexdigest()[:16]
        draft = self.folder / f".{name}.tmp"
        draft.write_text("".join(lines))
        return draft.rename(self.folder / f"{name}.jsonl")


def _line(row: TokenRow, steps: list[Step]) -> dict[str, object]:
    """Columns over the whole sequence; a log-prob is null where it is not trained or not known."""
    mask = [0] * len(row.ids)
    log_probs: list[float | None] = [None] * len(row.ids)
    own = [steps[i] for i in row.steps]
    for step in own:
        response = slice(len(step.prompt_ids), step.n_tokens)
        mask[response] = [1] * len(step.response_ids)
        if step.rollout_log_probs is not None:
            log_probs[response] = step.rollout_log_probs.tolist()
    first = own[0]
    return {
        "prompt_uid": first.prompt_uid,
        "trajectory_uid": first.trajectory_uid,
        "policy_version": min(step.policy_version for step in own),
        "input_ids": row.ids.tolist(),
        "loss_mask": mask,
        "rollout_log_probs": log_probs,
    }
