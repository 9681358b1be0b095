"""Half a point for the right answer, and the other half for naming the document that says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REPLY = re.compile(r"(?P<answer>[^\[\]]+?)(?: \[(?P<document>[^\[\]]*)\])?")
"""`1432 [d17]`: the answer, then the id of the document."""


def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    **kwargs: Any,
) -> dict[str, float]:
    """The score, and whether answer and citation are right. A citation below a wrong answer earns
    nothing: it would pay for citing whatever was found first.

    Args:
        extra_info: `metadata.document` is the id of the document that has the answer.
    """
    reply = REPLY.fullmatch(solution_str.strip())
    right = reply is not None and reply["answer"] == ground_truth
    cited = right and reply is not None and reply["document"] == extra_info["metadata"]["document"]
    return {"score": (right + cited) / 2, "answer_right": right, "citation_right": cited}
