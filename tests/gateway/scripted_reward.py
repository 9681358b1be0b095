"""A reward function for processes of their own, which load no more than it."""

from typing import Any


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1.0 for the very answer."""
    return float(solution_str == ground_truth)
