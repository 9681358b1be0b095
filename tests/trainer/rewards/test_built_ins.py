"""The built-in rewards: what each takes for the answer, and what it pays for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.trainer.errors import RewardValueError
from stepwell.trainer.rewards.base import last_boxed
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.rewards.text import words


def score(
    name: str, answer: str, truth: Any, extra: dict[str, Any] | None = None, **kw: Any
) -> Any:
    result: Any = load_reward(name, kw or None)("any", answer, truth, extra or {})
    return result["score"] if isinstance(result, dict) else result


# ── \boxed{} ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{a}", "a"),
        (r"\boxed{}", ""),
        (r"\boxed{cut off", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_box_is_read_with_its_braces_balanced(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@given(st.text(alphabet="ab1{}\\ ", max_size=20), st.text(alphabet="ab1\\ ", max_size=20))
def test_what_was_put_in_a_box_comes_out(before: str, inside: str) -> None:
    assert last_boxed(before + "\\boxed{" + inside + "}") == inside
    nested = "{" + inside + "}{" + inside + "}"
    assert last_boxed(before + "\\boxed{" + nested + "}") == nested


@pytest.mark.parametrize(
    ("name", "answer", "truth", "expected"),
    [
        ("exact_match", r"It is \boxed{Paris}", "Paris", 1.0),
        ("exact_match", "Paris", "Paris", 0.0),
        ("f1", r"not this \boxed{the red fox}", "red fox", 1.0),
        ("gpqa", r"A? B? \boxed{C}", "C", 1.0),
        ("math", r"12 \boxed{13}", "12", 0.0),
        ("math", r"\boxed{0.5} then 7", "1/2", 1.0),
        ("math", "it is 12", "12", 0.0),
        ("dapo", r"\boxed{12}", "12", 1.0),
        ("dapo", "Answer: 12", "12", -1.0),
        ("deepscaler", r"\boxed{12}", "12", 1.0),
        ("reasoning_gym", r"so \boxed{12}", "12", 1.0),
    ],
)
def test_with_boxed_before_its_name_a_reward_sees_the_box_only(
    name: str, answer: str, truth: str, expected: float
) -> None:
    source = "chain_sum" if name == "reasoning_gym" else "any"
    result: Any = load_reward(f"boxed_{name}")(source, answer, truth, {})
    assert (result["score"] if isinstance(result, dict) else result) == expected


# ── mathematics ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"\boxed{12}", "12", 1.0),
        ("The answer is 12.", "12", 1.0),
        ("The answer is $\\frac{2}{4}$", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        (r"\boxed{-3}", r"\boxed{-3}", 1.0),
        (r"\boxed{3}", 3, 1.0),
        (r"\boxed{3}", ["2", "3"], 1.0),
        (r"\boxed{3} \boxed{4}", "3", 0.0),
        (r"\boxed{4} \boxed{3}", "3", 1.0),
        (r"\boxed{}", "3", 0.0),
        ("", "3", 0.0),
        ("no number at all", "3", 0.0),
        (r"\boxed{\text{Paris}}", "Paris", 1.0),
        (r"\boxed{Pairs}", "Paris", 0.0),
        (r"\boxed{yx}", "xy", 1.0),
        (r"\boxed{x \cdot y}", "xy", 1.0),
        (r"\boxed{xz}", "xy", 0.0),
        (r"\boxed{tac}", "cat", 0.0),
        (r"\boxed{and}", "or", 0.0),
        (r"\boxed{on}", "no", 0.0),
        (r"\boxed{\pi}", "pi", 1.0),
        (r"\boxed{10\,000}", "10000", 1.0),
        (r"\boxed{\text{10,000}}", "10000", 1.0),
        (r"\boxed{10\,001}", "10000", 0.0),
        (r"\boxed{1\,2}", "12", 0.0),
        ("12 " + "x " * 2000, "12", 0.0),
    ],
)
def test_math_compares_by_value(answer: str, truth: Any, expected: float) -> None:
    assert score("math", answer, truth) == expected


@pytest.mark.parametrize("truth", [None, "", [], [None]])
@pytest.mark.parametrize("name", ["math", "deepscaler", "dapo"])
def test_without_a_right_answer_a_score_is_missing_not_zero(name: str, truth: Any) -> None:
    with pytest.raises(RewardValueError, match="label_key"):
        score(name, "Answer: 4", truth)


def test_a_way_of_reading_that_gsm8k_does_not_have_is_told_by_its_name() -> None:
    with pytest.raises(RewardValueError, match="method is 'loose'; it should be 'strict' or"):
        score("gsm8k", "#### 4", "4", method="loose")


def test_a_right_answer_that_is_no_mathematics_is_missing_unless_met_word_for_word() -> None:
    truth = r"\left( "
    assert score("math", rf"\boxed{{{truth}}}", truth) == 1.0
    with pytest.raises(RewardValueError, match="no mathematics"):
        score("math", r"\boxed{4}", truth)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"<think>\boxed{1}</think>So \boxed{12}", 1.0),
        (r"<think>\boxed{12}</think>So \boxed{1}", 0.0),
        (r"<think>\boxed{12}", 0.0),
        (r"\boxed{12}", 0.0),
        ("<think></think>12", 0.0),
        (r"###Response \boxed{12.0}", 1.0),
    ],
)
def test_deepscaler_pays_for_a_box_after_the_thinking(answer: str, expected: float) -> None:
    assert score("deepscaler", answer, "12") == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("… Answer: 12", 1.0),
        ("Answer: 3\nAnswer: $12$.", 1.0),
        (r"answer: \boxed{12}", 1.0),
        ("Answer: 12\nAnswer: 3", -1.0),
        ("12", -1.0),
        ("Answer:\n12", 1.0),
        ("**Final Answer:**\n\n$12$", 1.0),
        ("Answer: **12**", 1.0),
        ("Answer: 12<|im_end|>", 1.0),
        ("Answer:\n13", -1.0),
        ("Answer: 12" + " " * 300, -1.0),
    ],
)
def test_dapo_pays_for_the_last_answer_line_and_fines_all_else(
    answer: str, expected: float
) -> None:
    assert score("dapo", answer, "12") == expected


def test_dapo_says_whether_it_was_right_and_what_it_read() -> None:
    result: Any = load_reward("dapo")("any", "Answer: 13", "12", {})
    assert result == {"score": -1.0, "acc": False, "pred": "13"}


# ── words ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("The red fox!", "red fox", 1.0),
        ("red dog", "red fox", 0.5),
        ("red red", "red fox", 0.5),
        ("a quick red fox", "fox", 2 * (1 / 3) / (4 / 3)),
        ("", "fox", 0.0),
        ("yes it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("no fox", ["red fox", "no fox"], 1.0),
    ],
)
def test_f1_counts_shared_words(answer: str, truth: Any, expected: float) -> None:
    assert score("f1", answer, truth) == pytest.approx(expected)


@given(st.text(max_size=30), st.text(max_size=30))
def test_f1_is_symmetric_and_one_for_the_same_words_only(a: str, b: str) -> None:
    one: Any = load_reward("f1")("any", a, b, {})
    other: Any = load_reward("f1")("any", b, a, {})
    assert one["score"] == pytest.approx(other["score"])
    assert 0 <= one["score"] <= 1
    assert (one["score"] == 1.0) == (sorted(words(a)) == sorted(words(b)))


def test_f1_without_a_right_answer_is_missing_not_zero() -> None:
    with pytest.raises(RewardValueError, match="has none"):
        score("f1", "fox", None)


# ── letters ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "pred"),
    [
        ("The answer is (C).", "C"),
        ("Answer: B", "B"),
        ("**Answer: D**", "D"),
        ("**Answer:** C\n\nOption A is too large, option D has no unit.", "C"),
        ("__Answer__: (C). Choice B is its inverse.", "C"),
        ("Not A. I take option B; C is wrong.", "B"),
        ("answer" + " " * 50_000 + "x", None),
        ("answer: A, no: the answer is B", "B"),
        ("<think>Answer: A</think> I choose C", "C"),
        (r"Answer: A, \boxed{\text{B}}", "B"),
        ("I'd say B", "B"),
        ("D", "D"),
        ("The answer is a fish", None),
        ("The correct answer: (b)", "B"),
        ("answer: c.", "C"),
        ("We rule out option (b). Therefore C.", "C"),
        ("Some may think A is correct. So D.", "D"),
        ("It is not option d, it is A", "A"),
        ("The answer is a\nnumber: (C)", "C"),
        ("The answer is e.g. B", "B"),
        (r"Thus \boxed{\textbf{(C)}\ 4}", "C"),
        (r"\boxed{C. 4 m}", "C"),
        (r"\boxed{\text{C: 4 m}}", "C"),
        (r"\boxed{C or D}", None),
        (r"\boxed{(C) or (D)}", None),
        (r"\boxed{(C), not D}", None),
        ("E", None),
        ("", None),
    ],
)
def test_gpqa_reads_the_letter_that_was_chosen(answer: str, pred: str | None) -> None:
    result: Any = load_reward("gpqa")("gpqa", answer, "C", {})
    assert result == {"score": float(pred == "C"), "acc": pred == "C", "pred": pred}


@pytest.mark.parametrize("truth", ["B", "(b)", 1, "1", "blue"])
def test_gpqa_takes_the_letter_the_index_or_the_text_for_the_right_answer(truth: Any) -> None:
    choices = {"choices": ["red", "Blue", "green"]}
    assert score("gpqa", "Answer: B", truth, choices) == 1.0
    assert score("gpqa", "Answer: C", truth, choices) == 0.0
    assert score("gpqa", "Answer: B", truth, {"choices": {"A": "red", "B": "blue"}}) == 1.0


def test_gpqa_takes_a_number_as_text_for_no_index_where_choices_are_numbers() -> None:
    assert score("gpqa", "Answer: C", "1", {"choices": ["3", "2", "1"]}) == 1.0
    with pytest.raises(RewardValueError, match="none of the letters"):
        score("gpqa", "Answer: B", "1", {"choices": ["3 m", "2 m", "1 m"]})


@pytest.mark.parametrize(
    ("answer", "pred"),
    [
        (r"\boxed{-4 m}", "B"),
        (r"\boxed{\text{-4 m}.}", "B"),
        (r"\boxed{B: -4 m}", "B"),
        ("A short sum. The answer is -4 m.", "B"),
        ("**Answer:** 4 m", "A"),
        ("The answer is 14 m", None),
        (r"\boxed{x > 0}", "D"),
        (r"\boxed{1.4 m}", None),
        ("Answer: -4 m, which is (C)", "C"),
    ],
)
def test_gpqa_reads_the_text_of_a_choice_where_no_letter_is_named(
    answer: str, pred: str | None
) -> None:
    choices = {"choices": ["4 m", "-4 m", "x < 0", "x > 0"]}
    result: Any = load_reward("gpqa")("gpqa", answer, "B", choices)
    assert result["pred"] == pred


@pytest.mark.parametrize("truth", [None, "purple", 7, True, "E"])
def test_a_right_answer_that_is_no_choice_is_missing_not_zero(truth: Any) -> None:
    with pytest.raises(RewardValueError, match="none of the letters"):
        score("gpqa", "Answer: B", truth, {"choices": ["red", "blue"]})
