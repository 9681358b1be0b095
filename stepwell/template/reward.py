"""The reward: how good the agent's last reply is, as a number."""


def score(data_source, solution_str, ground_truth, extra_info):
    """1.0 if the reply is a number within the bounds, else 0.0.

    Args:
        data_source: where the task is from: `tasks`.
        solution_str: what the model replied.
        ground_truth: the task's `answer`.
        extra_info: the whole task.
    """
    low, high = ground_truth
    return float(solution_str.isdecimal() and low <= int(solution_str) <= high)
