"""Instructions that a program can check, in the manner of IFEval (arXiv:2311.07911).

Two of them contradict each other, and each is checked only where it was given: a policy that always
does the same does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    text: str
    """Text that the model is given."""
    followed: Callable[[str], bool]
    """True for a reply, white space at its ends removed, that follows the instruction."""


INSTRUCTIONS: dict[str, Instruction] = {
    "one_word": Instruction("Answer with one word.", lambda r: len(r.split()) == 1),
    "long": Instruction("Answer in at least 12 words.", lambda r: len(r.split()) >= 12),
    "begin": Instruction('Begin with the word "I".', lambda r: r.split()[:1] == ["I"]),
    "exclaim": Instruction("End with an exclamation mark.", lambda r: r.endswith("!")),
}


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    **kwargs: Any,
) -> float:
    """1.0 if the reply follows the instruction that `data_source` names, else 0.0."""
    return float(INSTRUCTIONS[data_source].followed(solution_str.strip()))
