"""Scores mathematical answers with `math-verify`: parsed and compared by value, not as text.

`math` takes the last \\boxed{} of the answer, or else its last expression. `deepscaler` and `dapo`
are the conventions of the two recipes. Owns where the answer is looked for; the comparison is
math-verify's (sympy), which may take seconds, now and then for ever: the manager `auto` runs these
in processes that can be killed. math-verify's own limits use a signal that only a main thread has,
and turn a timeout into "wrong"; they are off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from stepwell.trainer.errors import RewardValueError
from stepwell.trainer.rewards.base import last_boxed

# It warns of each call without a limit of its own; the manager limits the call.
logging.getLogger("math_verify").setLevel(logging.ERROR)

TAIL = 1000
"""Characters at the end of an answer without a box that are searched for its last expression."""
DAPO_TAIL = 300

_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '.-]+[A-Za-z.]+)*")
_PRODUCT = re.compile(
    r"(?!(?:am|an|as|at|be|by|do|go|he|if|in|is|it|me|my|no|of|on|or|so|to|up|us|we|cab)$)"
    r"(?:[a-z]{2}|[abcxyz]{3})"
)
"""Of letters: `xy`, which is also `yx`. Others are words."""
_NUMBER_AS_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{\s*(-?\d[\d,.]*)\s*\}")
_END = re.compile(r"<\|(?:im_end|endoftext)\|>")
"""Tokens that are text where special tokens are not skipped."""
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,; ]|~|\{,\})(?=\d{3}(?!\d))")
"""What LaTeX puts between the thousands."""


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """1.0 if the answer equals `ground_truth` (LaTeX or plain; or one of a list), else 0.0. `pred`
    is what was taken for the answer."""
    boxed = last_boxed(solution_str)
    # With several boxes math-verify takes their union: only the last one is the answer.
    answer = solution_str[-TAIL:] if boxed is None else f"\\boxed{{{boxed}}}"
    right = _any_equal(answer, _truths(ground_truth, data_source))
    return {"score": float(right), "acc": right, "pred": boxed}


def deepscaler(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """1.0 if the answer boxed after the thinking is right, else 0.0.

    DeepScaleR (https://github.com/agentica-project/rllm): only what follows `</think>` (or
    `###Response`) counts, and only in a \\boxed{}. Equality is math-verify's, which accepts
    equivalent forms that the recipe's own checker does not (unreduced fractions).
    """
    for mark in ("</think>", "###Response"):
        if mark in solution_str:
            boxed = last_boxed(solution_str.rpartition(mark)[2])
            break
    else:
        boxed = None
    truths = _truths(ground_truth, data_source)
    return float(boxed is not None and _any_equal(f"\\boxed{{{boxed}}}", truths))


def geo3k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """0.9 for the right answer in a \\boxed{}, and 0.1 for `<think>…</think>` with a box behind it:
    the rule of EasyR1 and verl for geometry3k. Equality is math-verify's."""
    boxed = last_boxed(solution_str)
    truths = _truths(ground_truth, data_source)
    right = boxed is not None and _any_equal(f"\\boxed{{{boxed}}}", truths)
    formed = bool(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", solution_str, re.DOTALL))
    return {"score": 0.9 * right + 0.1 * formed, "acc": right, "pred": boxed}


def dapo(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """DAPO's rule (arXiv 2503.14476, §2.4): 1.0 if right, else -1.0; `acc` and `pred` beside it.

    The answer is the last line `Answer: …` of the last 300 characters, or the line after it, as in
    verl.
    """
    truths = _truths(ground_truth, data_source)
    lines = re.findall(r"(?i)answer\s*:[\s*]*([^\n]+)", solution_str[-DAPO_TAIL:])
    pred = lines[-1].strip() if lines else None
    right = pred is not None and _any_equal(_as_answer(pred), truths)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def equal(answer: str, truth: str) -> bool:
    """True if `answer`, or its last box, is `truth` as text, or math-verify finds `truth` in it. A
    `truth` of words is compared as text alone.

    Raises:
        RewardValueError: `truth` is nothing that it can read.
    """
    answer, truth = _plain_numbers(answer), _plain_numbers(truth)
    given = last_boxed(answer)
    text = _plain(given if given is not None else answer)
    if text == _plain(truth):
        return True
    if _WORDS.fullmatch(_plain(truth)) and not _PRODUCT.fullmatch(truth.strip().strip("$")):
        return False  # sympy would read a word as a product of its letters: Paris = pairs
    if truth == "pi":
        truth = r"\pi"
    wanted = parse(
        f"\\boxed{{{truth}}}",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not wanted:
        raise RewardValueError(
            f"the right answer {truth!r:.80} is no mathematics that math-verify can read; "
            "use exact_match or f1 for such data"
        )
    got = parse(
        answer,
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    return bool(verify(wanted, got, timeout_seconds=None))


def _any_equal(answer: str, truths: list[str]) -> bool:
    unreadable: RewardValueError | None = None
    for truth in truths:
        try:
            if equal(answer, truth):
                return True
        except RewardValueError as e:
            unreadable = e
    if unreadable is not None:
        raise unreadable
    return False


def _as_answer(line: str) -> str:
    """A line as math-verify finds it, whether it is LaTeX in dollars, boxed or plain."""
    if last_boxed(line) is not None:
        return line
    line = _END.sub("", line).strip("*` ")
    return "\\boxed{" + line.strip("$").rstrip(".").strip("$ ") + "}"


def _plain_numbers(text: str) -> str:
    return _BETWEEN_DIGITS.sub("", _NUMBER_AS_TEXT.sub(r"\1", text))


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1", text)
    return " ".join(text.strip().strip("$").rstrip(".").split()).lower()


def _truths(ground_truth: Any, data_source: str) -> list[str]:
    given = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    truths = [last_boxed(str(t)) or str(t).strip() for t in given if t is not None]
    if not truths or not all(truths):
        raise RewardValueError(
            f"a task of {data_source!r} has the right answer {ground_truth!r:.80}; set the data "
            "section's label_key to where it is"
        )
    return truths
