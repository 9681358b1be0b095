"""slime's sample: one sequence that is trained on, or a prompt that is still to be rolled out.

`SlimeSample` has the fields of `slime.utils.types.Sample` (THUDM/slime 0.3.1, commit 624b824), all
of them with slime's names and defaults, so that functions written for slime (filters, rewards,
buffers) run where slime is not installed, and no field is lost on the way through Stepwell. Where
slime can be imported, samples are slime's own class: `sample_class`, `as_slime`.

Does not own: what Steps become (`samples.py`). Needs no slime, loads no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

SAMPLE = "slime_sample"
"""Key of a trajectory's metadata: prompt, response, status and further attributes of the Sample
that a generate function made of it."""
_TEXTS: Mapping[str, Any] = {"prompt": (str, list), "response": str}
"""Fields that a generate function gives, with their types."""


@dataclass
class _Counts:
    """Numbers that an engine reports, summed over calls."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{f.name: data.get(f.name, 0) for f in fields(cls)})


@dataclass
class SpecInfo(_Counts):
    """Counts of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted / drafted tokens; 0 without any."""
        return _ratio(self.spec_accept_token_num, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification; 0 without any."""
        return _ratio(self.completion_token_num, self.spec_verify_ct)


@dataclass
class PrefixCacheInfo(_Counts):
    """Counts of the engine's prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached / prompt tokens; 0 without any."""
        return _ratio(self.cached_tokens, self.total_prompt_tokens)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass
class SlimeSample:
    """slime's `Sample`, field by field. Functions may set attributes of their own, which
    `to_dict` has, too."""

    class Status(StrEnum):
        """Progress of the sample, or the way in which its last call ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    """One per prompt; what rewards are normalised by."""
    index: int | None = None
    """The same as `rollout_id`, as in slime."""
    rollout_id: int | None = None
    """One per trajectory, shared by its samples; what the loss is normalised by."""
    prompt: str | list[dict[str, Any]] = ""
    """Prompt of a sample that is still to be rolled out; else empty: the tokens say it."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    """Tensors that the model's processor makes of the pictures: `pixel_values`, `image_grid_thw`.
    None: there are none, or nobody trains the sample."""
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    """Text; empty in samples that were made of Steps: the tokens say it."""
    response_length: int = 0
    """Tokens from the first response that this sample is for, to the end."""
    label: Any = None
    """The right answer, for the reward."""
    reward: float | dict[str, Any] | None = None
    """The trajectory's, on each of its samples; None: not scored."""
    loss_mask: list[int] | None = None
    """[response_length]; 1: sampled, and trained in this sample."""
    weight_versions: list[str] = field(default_factory=list)
    """Weight version of each run of trained tokens that one version sampled."""
    rollout_log_probs: list[float] | None = None
    """[response_length]; 0 where `loss_mask` is 0, as slime pads."""
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    """[tokens - 1, layers, experts]: routing of each input position, as sampled."""
    remove_sample: bool = False
    """Nothing of it is trained; it stands for its rollout, since slime counts rollouts."""
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    """Samples made of Steps have the trajectory's, and `prompt_uid`, `trajectory_uid`,
    `step_indices`, `source_name`."""
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    truncated: InitVar[bool | None] = None
    """A field of slime's `Sample` before it had `status`: given to the constructor, it says whether
    `status` is `TRUNCATED` or `COMPLETED`."""

    def __post_init__(self, truncated: bool | None) -> None:
        if truncated is not None:
            self.status = self.Status.TRUNCATED if truncated else self.Status.COMPLETED

    @property
    def effective_response_length(self) -> int:
        """Trained tokens of the response."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response: sampled ones with their log-probs and the answer's
        `meta_info`, or, not `trainable`, those of a tool.

        Raises:
            ValueError: log-probs are missing, too many, or of tokens that nobody sampled.
        """
        tokens = [int(i) for i in tokens or ()]
        n_before = self.response_length
        if tokens and trainable and log_probs is None:
            raise ValueError("trainable tokens come with their log_probs; pass one for each")
        if tokens and not trainable and log_probs is not None:
            raise ValueError("tokens that are not trainable have no log_probs; leave them out")
        known = [0.0] * len(tokens) if log_probs is None else [float(p) for p in log_probs]
        if len(known) != len(tokens):
            raise ValueError(f"log_probs has {len(known)} values for {len(tokens)} tokens")
        if tokens and trainable and n_before and self.rollout_log_probs is None:
            raise ValueError(
                f"{n_before} response tokens have no rollout_log_probs, so those of more sampled "
                "tokens would stand alone; set rollout_log_probs first"
            )
        self.response += text or ""
        if tokens:
            mask = [1] * n_before if self.loss_mask is None else self.loss_mask
            before = self.rollout_log_probs
            self.tokens = [*self.tokens, *tokens]
            self.response_length += len(tokens)
            self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
            self.rollout_log_probs = [*([0.0] * n_before if before is None else before), *known]
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self._end_call(args, meta_info)

    def _end_call(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        self.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens", 0)
        self.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
        if getattr(args, "sglang_speculative_algorithm", None):
            for name in ("accept_token_num", "draft_token_num", "verify_ct"):
                n = getattr(self.spec_info, f"spec_{name}") + meta_info.get(f"spec_{name}", 0)
                setattr(self.spec_info, f"spec_{name}", n)
            self.spec_info.completion_token_num += meta_info.get("completion_tokens", 0)
        if "weight_version" in meta_info:
            self.weight_versions = [*self.weight_versions, meta_info["weight_version"]]
        ended = {"stop": "completed", "length": "truncated", "abort": "aborted"}
        self.status = self.Status(ended[meta_info["finish_reason"]["type"]])

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its part `args.reward_key`; None: not scored."""
        if isinstance(self.reward, dict) and args.reward_key:
            return self.reward[args.reward_key]
        return self.reward

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `from_dict` takes, slime's too."""
        return vars(self) | {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlimeSample:
        """Reads `to_dict`, slime's too. What is no field becomes an attribute.

        Raises:
            ValueError: `status` is none of slime's.
        """
        names = {f.name for f in fields(cls)}
        sample = cls(**{k: v for k, v in data.items() if k in names})
        sample.status = cls.Status(sample.status)
        sample.metadata = sample.metadata or {}  # slime's functions may say None
        sample.spec_info = SpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        vars(sample).update({k: v for k, v in data.items() if k not in names})
        return sample


def sample_class() -> Any:
    """slime's `Sample` where slime can be imported, else `SlimeSample`."""
    try:
        return importlib.import_module("slime.utils.types").Sample
    except ImportError:  # not installed, or another package of this name
        return SlimeSample


def as_slime(sample: SlimeSample) -> Any:
    """The sample as `sample_class`."""
    return sample_class().from_dict(sample.to_dict())


def put_back(sample: SlimeSample, of_function: Mapping[str, Any]) -> None:
    """Give `sample` text, status and further attributes that the Sample of a generate function had:
    `SAMPLE` of its trajectory. Anybody who has the trajectory may write there, so it sets no other
    field (some name code) and hides no method."""
    kinds = (SlimeSample, sample_class())
    own = {f.name for kind in kinds for f in fields(kind)}
    given = {
        name: value
        for name, value in of_function.items()
        if isinstance(value, _TEXTS.get(name, ()))
        or not (name in own or any(hasattr(kind, name) for kind in kinds))
    }
    with suppress(ValueError):  # none, or none of slime's
        given["status"] = SlimeSample.Status(str(of_function.get("status")))
    vars(sample).update(given)
