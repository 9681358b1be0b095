"""The reward: how good the model's last reply is."""


def score(data_source, solution_str, ground_truth, extra_info):
    """1.0 if the reply is a number within the bounds, the task's `answer`; else 0.0."""
    low, high = ground_truth
    return float(solution_str.isdecimal() and low <= int(solution_str) <= high)
