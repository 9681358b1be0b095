"""Rewards: functions that score an answer.

A reward function takes `(data_source, solution_str, ground_truth, extra_info, **kwargs)`, or, as
slime's do, `(args, sample)`, and returns a number, a list of one per step, or a dict with either
under "score" (its other keys are metrics); it may be async. It is named by

- a built-in's name (`loading.BUILT_IN`); `boxed_` before it scores what the answer has in \\boxed{}
- a dotted path: `package.module:function`
- a file: `path/to/file.py:function`; without a name it is `compute_score`

Without a name, the usual one of the task's data source is taken (`data_sources.py`). A class in
its place is made once, with the configured `kwargs`, and then called. With the managers `batch` and
`group` the four arguments are lists, and so is the result.

Owns: finding the function, running it under a time limit, trying again, telling a score from a
failure. Does not own: what happens to a trajectory without a score (`trainer/scoring.py`). Imports
nothing: each process of a function (`worker.py`) would load it.
"""
