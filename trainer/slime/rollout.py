"""Rollout function of slime runs that train on what the gateway records. On their command line:

    --rollout-function-path            stepwell.trainer.slime.rollout.generate_rollout
    --data-source-path                 stepwell.trainer.slime.data_source.PoolDataSource
    --custom-reward-post-process-path  stepwell.backends.slime.backend.post_process_rewards
    --custom-config-path               stepwell.yaml        {stepwell_namespace: stepwell-NAME, …}

    slime                     generate_rollout                    PoolDataSource          DataPool
    generate(7) ──────────────► take(7) ─────────────────────────► lease, write down ────► leased
                ◄── samples, by prompt, by trajectory
    train, save_model(7)
    save(7) ──────────────────────────────────────────────────────► settle(7) ───────────► acked
    (killed; started again)
    load(7) ──────────────────────────────────────────────────────► resume(7) ── all else ► ready

Agents run elsewhere, against the gateway (`stepwell serve`, on slime's Ray cluster, attached to the
engines that slime's router lists at `/workers`). slime waits for `--rollout-batch-size` groups and
gets all rollouts of them, `--n-samples-per-prompt` each. Without `--save-interval` slime never
saves, and a rollout's groups are acked when the next one is asked for.

Owns: slime's rollout function. Does not own: the data source (`data_source.py`), leases
(`pool.py`), samples (`backends/slime/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stepwell.backends.slime.backend import CENTRED
from stepwell.backends.slime.images import train_inputs
from stepwell.backends.slime.sample import as_slime
from stepwell.backends.slime.samples import Converted, not_trained, settle_log_probs, to_samples
from stepwell.datapool.dotted import resolve
from stepwell.datapool.types import Group
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.slime.config import folder
from stepwell.trainer.slime.data_source import PoolDataSource
from stepwell.trainer.slime.pool import SlimePool, scored

REWARD_HOOK = "stepwell.backends.slime.backend.post_process_rewards"


class TrainOutput(NamedTuple):
    """slime's `RolloutFnTrainOutput`, where slime is not installed."""

    samples: Any
    metrics: dict[str, Any]


class EvalOutput(NamedTuple):
    """slime's `RolloutFnEvalOutput`, where slime is not installed."""

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, Any]


def output(name: str, *values: Any) -> Any:
    """slime's `RolloutFn{name}` of these fields, or a plain tuple where slime is not installed."""
    try:
        return resolve(f"slime.rollout.base_types:RolloutFn{name}")(*values)
    except ImportError:
        return (TrainOutput if name == "TrainOutput" else EvalOutput)(*values)


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """For slime's `--rollout-function-path` (and `--eval-function-path`).

    Returns:
        `RolloutFnTrainOutput` with samples by prompt, by trajectory; or `RolloutFnEvalOutput` with
        rewards by data source. Plain tuples of these fields where slime is not installed.

    Raises:
        ConfigError: arguments with which slime would train something else than was recorded.
        BatchError: groups that slime cannot train.
        BackendConfigError: groups with pictures, and the model in --hf-checkpoint takes none.
    """
    if not isinstance(data_buffer, PoolDataSource):
        raise ConfigError(
            f"generate_rollout was given a {type(data_buffer).__name__}; set --data-source-path "
            "to stepwell.trainer.slime.data_source.PoolDataSource, which holds the groups "
            "until they are saved"
        )
    if evaluation:
        return _evaluate(args, data_buffer)
    check_arguments(args)
    n = args.n_samples_per_prompt
    first = rollout_id * args.rollout_batch_size
    groups = data_buffer.take(rollout_id)
    steps = [step for group in groups for step in group.steps]
    pictures = data_buffer.pool.pictures(groups)
    converted = to_samples(
        groups,
        first_group=first,
        first_rollout=first * n,
        group_size=n,
        temperature=args.rollout_temperature,
        inputs=train_inputs(folder(args, "hf_checkpoint"), steps, pictures),
    )
    converted.require_trainable()
    settle_log_probs(args, converted.flat)
    samples = [[[as_slime(s) for s in rollout] for rollout in g] for g in converted.samples]
    return output("TrainOutput", samples, _metrics(groups, converted, data_buffer.pool))


def check_arguments(args: Any, *, one_sample_each: bool = False) -> None:
    """Check slime's arguments.

    Args:
        args: slime's.
        one_sample_each: a trajectory is one sample, so slime's own normalisation of rewards is
            right, too.

    Raises:
        ConfigError: with these, slime would fail later or train something else.
    """
    problems = []
    hook, convert = (
        getattr(args, f"custom_{name}_path", None)
        for name in ("reward_post_process", "convert_samples_to_train_data")
    )
    normalises = args.advantage_estimator in CENTRED and args.rewards_normalization
    if normalises and not (one_sample_each or hook or convert):
        problems.append(
            "custom_reward_post_process_path is not set, and slime's own normalisation takes "
            f"samples for trajectories; set --custom-reward-post-process-path {REWARD_HOOK}"
        )
    if getattr(args, "reward_key", None):
        problems.append(
            f"reward_key is {args.reward_key!r}, but a trajectory's reward is one number; leave "
            "--reward-key out"
        )
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        problems.append(
            f"rollout_top_p is {args.rollout_top_p}, for which slime replays the kept tokens of "
            "each position, which Steps do not hold; sample at --rollout-top-p 1"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def _metrics(groups: Sequence[Group], converted: Converted, pool: SlimePool) -> dict[str, Any]:
    versions = [s.policy_version for g in groups for s in g.steps]
    flat = converted.flat
    return {
        "stepwell/steps": len(versions),
        "stepwell/samples_per_rollout": len(flat) / len({s.rollout_id for s in flat}),
        "stepwell/steps_without_log_probs": sum(
            s.rollout_log_probs is None for g in groups for s in g.steps
        ),
        "stepwell/padded_rollouts": converted.padded,
        "stepwell/policy_version_min": min(versions),
        "stepwell/policy_version_max": max(versions),
        "stepwell/held_groups": pool.held,
        "stepwell/redelivered_groups": pool.redelivered,
        **{f"stepwell/untrained_tokens/{why}": n for why, n in converted.untrained.items()},
        **{f"stepwell/dropped_groups/{why}": n for why, n in pool.dropped.items()},
    }


def _evaluate(args: Any, source: PoolDataSource) -> Any:
    """Rewards of the val channel's groups, one for each trajectory; slime trains none of them."""
    taken = source.look()
    groups = scored(taken)
    data: dict[str, dict[str, list[Any]]] = {}
    for rollouts in to_samples(groups, inputs=not_trained).samples:
        for rollout in rollouts:
            last = rollout[-1]  # of the trajectory's last call
            own = data.setdefault(
                last.metadata["source_name"], {"rewards": [], "truncated": [], "samples": []}
            )
            own["rewards"].append(last.reward)
            own["truncated"].append(last.status == "truncated")
            own["samples"].append(as_slime(last))
    n_taken, n_scored = (sum(len(g.trajectories) for g in gs) for gs in (taken, groups))
    metrics = {"stepwell/val_groups": len(taken), "stepwell/val_unscored": n_taken - n_scored}
    return output("EvalOutput", data, metrics)
