"""Token F1 of an answer in words, as in SQuAD's evaluation (arXiv 1606.05250).

F1 = 2·P·R / (P + R) over the words that answer and truth share, counted with multiplicity, after
lower-casing and without punctuation and articles. `yes`, `no` and `noanswer` are right or wrong,
with nothing between.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stepwell.trainer.rewards.errors import RewardValueError

_ALL_OR_NOTHING = {"yes", "no", "noanswer"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """The best F1 over the accepted answers (one, or a list), with its `precision`, `recall` and
    `exact` (1.0 if the words are the same)."""
    given = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    truths = [str(t) for t in given if t is not None]
    if not truths:
        raise RewardValueError(
            f"f1 needs a right answer, and a task of {data_source!r} has none; set the data "
            "section's label_key, or use another reward"
        )
    return max((_compare(solution_str, t) for t in truths), key=lambda r: r["score"])


def words(text: str) -> list[str]:
    """`text` as it is compared."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _compare(answer: str, truth: str) -> dict[str, float]:
    a, t = words(answer), words(truth)
    exact = float(a == t)
    whole = {" ".join(a), " ".join(t)} & _ALL_OR_NOTHING
    shared = sum((Counter(a) & Counter(t)).values())
    if exact or whole or not shared:
        return {"score": exact, "precision": exact, "recall": exact, "exact": exact}
    precision, recall = shared / len(a), shared / len(t)
    f1 = 2 * precision * recall / (precision + recall)
    return {"score": f1, "precision": precision, "recall": recall, "exact": 0.0}
