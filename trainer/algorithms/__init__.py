"""The mathematics of training: pure functions of flat columns.

    policy_losses/   L, what a token costs: ppo, gspo, cispo, dppo_tv, geo_mean, …
    advantages/      A, what a trajectory, step or token is worth: grpo, rloo, gae, …
    off_policy/      w, what a step of an older policy is worth: tis, mis, icepop, …
    kl.py            KL to the reference
    losses.py        Σ coef · (w · L + kl_coef · KL - entropy_coeff · H)
    registry.py      the members of each family by name

A member is one file: hyper-parameters, formula with its source, and an entry that names both. A
third party's is the same, in its own package (`registry.py`). Formulas: training-math.md.
"""
