"""Multiple choice, as in GPQA (arXiv 2311.12022): 1.0 if the chosen letter is the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from stepwell.trainer.rewards.base import last_boxed
from stepwell.trainer.rewards.errors import RewardValueError

DEFAULT_LETTERS = "ABCD"

_SAID = re.compile(
    r"(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*[*(\[\"']*([A-Z])\b(?!['’][a-z])"
)
_ALONE = re.compile(r"\b([A-Z])\b(?!['’][a-z])")


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """`ground_truth` is the letter, the index of the choice or its text. `extra_info` may hold
    `choices` (a list, or a dict by letter) or `valid_letters`; else the letters are A to D.

    The letter is that of the last \\boxed{}, else of the last `answer: X` (`the answer is (X)`),
    else the last capital that stands alone; only what follows `</think>` is read.
    """
    info = extra_info or {}
    choices = info.get("choices")
    if isinstance(choices, Mapping):
        letters = [str(k).upper() for k in choices]
        texts = [str(v) for v in choices.values()]
    else:
        texts = [str(c) for c in choices or ()]
        letters = list(string.ascii_uppercase[: len(texts)] or DEFAULT_LETTERS)
    letters = [str(x).upper() for x in info.get("valid_letters") or letters]
    right = _letter(ground_truth, letters, texts, data_source)
    pred = extract(solution_str, letters)
    return {"score": float(pred == right), "acc": pred == right, "pred": pred}


def extract(text: str, letters: list[str]) -> str | None:
    """The letter that `text` chooses; None: none of `letters`."""
    text = text.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None:
        inside = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", boxed).strip(" ().$")
        return inside.upper() if inside.upper() in letters else None
    for pattern in (_SAID, _ALONE):
        found = [str(x).upper() for x in pattern.findall(text) if str(x).upper() in letters]
        if found:
            return found[-1]
    return None


def _letter(truth: Any, letters: list[str], texts: list[str], data_source: str) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(letters):
        return letters[truth]
    if isinstance(truth, str):
        if truth.strip().strip("()").upper() in letters:
            return truth.strip().strip("()").upper()
        same = [x for x, t in zip(letters, texts, strict=False) if _fold(t) == _fold(truth)]
        if len(same) == 1:
            return same[0]
    raise RewardValueError(
        f"a task of {data_source!r} has the right answer {truth!r:.80}, which is none of the "
        f"letters {', '.join(letters)}, nor the index or the text of one choice; correct "
        "label_key, or put the choices into the task's metadata"
    )


def _fold(text: str) -> str:
    return " ".join(text.lower().split())
