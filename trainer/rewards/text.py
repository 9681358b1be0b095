"""Answers compared as text: the very answer, the words that it shares, the letter chosen, the
number after a mark."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stepwell.trainer.errors import RewardValueError
from stepwell.trainer.rewards.base import last_boxed

_ALL_OR_NOTHING = {"yes", "no", "noanswer"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """1.0 if the answer is the right one, or one of them, character for character but for white
    space, else 0.0; numbers are compared as written."""
    return float(_plain(solution_str) in map(_plain, _truths(ground_truth, data_source)))


def f1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Token F1 of an answer in words, as in SQuAD's evaluation (arXiv 1606.05250): the best over
    the accepted answers, with its `precision`, `recall` and `exact` (1.0 if the words are the
    same).

    F1 = 2·P·R / (P + R) over the words that answer and truth share, counted with multiplicity,
    after lower-casing and without punctuation and articles. `yes`, `no` and `noanswer` are right or
    wrong, with nothing between.
    """
    truths = _truths(ground_truth, data_source)
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


def _truths(ground_truth: Any, data_source: str) -> list[str]:
    given = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    truths = [str(t) for t in given if t is not None]
    if not truths:
        raise RewardValueError(
            f"this reward needs a right answer, and a task of {data_source!r} has none; set "
            "data.train.label_key, or use another reward"
        )
    return truths


def _plain(text: str) -> str:
    return " ".join(text.split())


DEFAULT_LETTERS = "ABCD"

_LETTER = r"(?i:\s+is)?[\s*_]{0,9}[:=]?[\s*_(\[\"']{0,9}([A-Z])\b(?!['’][a-z])"
_SMALL = r"(?i:\s+is)?[\s*_]{0,9}[:=]?[\s*_]{0,9}(?:[(\[]([a-z])[)\]]|([a-z])[\s*_.]{0,9}\Z)"
"""A small letter is a choice in brackets, or as the last word."""
_ANSWER = re.compile(f"(?i:answer)(?:{_LETTER}|{_SMALL})")
_OPTION = re.compile(f"(?i:choice|option){_LETTER}")
_ALONE = re.compile(r"\b([A-Z])\b(?!['’][a-z])")
_LABEL = re.compile(r"[\s(\[{*]*([A-Z])\s*[)\].:]")
"""A choice's letter and its text."""
_SAID = re.compile(r"(?i)answer(?:\s+is)?[\s*_]*[:=]?[\s*_]*([^\n]*)")


def gpqa(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Multiple choice, as in GPQA (arXiv 2311.12022): 1.0 if the chosen letter is the right one.

    `ground_truth` is the letter, the index of the choice or its text. `extra_info` may hold
    `choices` (a list, or a dict by letter) or `valid_letters`; else the letters are A to D.

    The letter is that of the last \\boxed{}, else of the last `answer: X` (`the answer is (X)`,
    `**Answer:** X`), else of the last `option X`, else of the choice whose text is the answer, else
    the last capital that stands alone; a box may hold the text, too. Only what follows `</think>`
    is read.
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
    pred = chosen(solution_str, letters, texts)
    return {"score": float(pred == right), "acc": pred == right, "pred": pred}


def chosen(text: str, letters: list[str], texts: Sequence[str] = ()) -> str | None:
    """The letter that `text` chooses; None: none of `letters`.

    Args:
        texts: of the choices, in the order of their letters.
    """
    text = text.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None:
        inside = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", boxed)
        alone = inside.strip(" ().$").upper()
        if alone in letters:
            return alone
        if (same := _same_choice(inside, letters, texts)) is not None:
            return same
        named = {x for x in _ALONE.findall(inside) if x in letters}
        return named.pop() if len(named) == 1 and _LABEL.match(inside) else None
    for pattern in (_ANSWER, _OPTION):
        if found := _last_of(pattern, text, letters):
            return found
    for said in reversed(_SAID.findall(text)):
        if (same := _same_choice(said, letters, texts)) is not None:
            return same
    return _last_of(_ALONE, text, letters)


def _last_of(pattern: re.Pattern[str], text: str, letters: list[str]) -> str | None:
    """Last letter that `pattern` finds, out of `letters`."""
    found = [next(x for x in match.groups() if x) for match in pattern.finditer(text)]
    return next((x.upper() for x in reversed(found) if x.upper() in letters), None)


def _same_choice(text: str, letters: list[str], texts: Sequence[str]) -> str | None:
    """The one choice that has this text, signs and all."""
    same = [x for x, t in zip(letters, texts, strict=False) if _bare(t) == _bare(text)]
    return same[0] if len(same) == 1 else None


def _bare(text: str) -> str:
    return " ".join(text.replace("\\ ", " ").split()).lower().strip("$* ").rstrip(".").strip("$* ")


def _letter(truth: Any, letters: list[str], texts: list[str], data_source: str) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(letters):
        return letters[truth]
    if isinstance(truth, str):
        if truth.strip().strip("()").upper() in letters:
            return truth.strip().strip("()").upper()
        same = [
            x
            for x, t in zip(letters, texts, strict=False)
            if _plain(t).lower() == _plain(truth).lower()
        ]
        if len(same) == 1:
            return same[0]
        # A cell of a CSV file is text. Where choices are numbers it may be meant for one of them.
        indices = [] if re.search("[0-9]", "".join(texts)) else map(str, range(len(letters)))
        if found := dict(zip(indices, letters, strict=False)).get(truth.strip()):
            return found
    raise RewardValueError(
        f"a task of {data_source!r} has the right answer {truth!r:.80}, which is none of the "
        f"letters {', '.join(letters)}, nor the index or the text of one choice; correct "
        "label_key, or put the choices into the task's metadata"
    )


_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")
GSM8K_TAIL = 300
"""Characters at the end that are searched, as in verl."""


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    **kwargs: Any,
) -> float:
    """`score` for the right number after `####` (arXiv 2110.14168), `format_score` for a wrong one,
    else 0.0; as verl's, whose arguments these are.

    Args:
        ground_truth: the number, or the data set's solution, which ends in `#### number`.
        method: "flexible" takes the last number, marked or not.
    """
    if method not in ("strict", "flexible"):
        raise RewardValueError(f"method is {method!r}; it should be 'strict' or 'flexible'")
    found = (_GSM8K_ANSWER if method == "strict" else _NUMBER).findall(solution_str[-GSM8K_TAIL:])
    if not found:
        return 0.0
    truths = [_number(t.rpartition("####")[2]) for t in _truths(ground_truth, data_source)]
    return score if _number(found[-1]) in truths else format_score


def _number(text: str) -> float | str:
    """Equal for equal numbers: 1,000 and 1000.0."""
    plain = text.strip().replace(",", "").replace("$", "").rstrip(".")
    try:
        return float(plain)
    except ValueError:
        return plain


def search_r1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """1.0 if the last <answer>…</answer> is an accepted one, but for case, punctuation and
    articles; else 0.0. Search-R1 (arXiv 2503.09516), as verl scores it.

    `ground_truth` is the answer, a list of them, or {"target": …}. More than ten tags cost three
    quarters.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    truths = [words(t) for t in _truths(target, data_source)]
    found = re.findall(r"(?s)<answer>(.*?)</answer>", solution_str)
    if not found or words(found[-1]) not in truths:
        return 0.0
    return 0.25 if max(map(solution_str.count, ("<answer>", "</answer>"))) > 10 else 1.0


def coin(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """0 or 1 at random: to try a pipeline out, and to see what a run makes of noise. slime's
    `random`."""
    return float(random.getrandbits(1))
