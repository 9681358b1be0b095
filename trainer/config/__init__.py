"""The trainer's configuration: one file per section, each key with its type, bound and meaning.

    data         where prompts come from
    rollout      the agent, how often and how long it tries, and what scores it
    sampling     async_training: who generates when; sampling: which groups are trained
    validation   how the policy is validated
    publish      how a new version is let into traffic, and taken back
    algorithm    advantage, loss, KL to a reference, off-policy correction, critic
    trainer      how long, in what batches, and what is kept
    tools        the file of tools that an agent may load; no section of a run

Does not own: reading YAML, and what must fit across rooms (`RunConfig` in the shell). Loads no
torch and no data.
"""

from stepwell.trainer.config.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    LossConfig,
    OffPolicyConfig,
    SftConfig,
)
from stepwell.trainer.config.data import (
    CustomSource,
    DataConfig,
    HarborSource,
    HuggingFaceSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
    TableConfig,
    Truncation,
    VerifiersSource,
    episodes_of,
)
from stepwell.trainer.config.publish import GuardConfig, PublishConfig
from stepwell.trainer.config.rollout import (
    OverlongBufferConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
)
from stepwell.trainer.config.sampling import (
    LAG_LIMIT,
    AsyncTrainingConfig,
    Mode,
    SamplingConfig,
    check_sampling,
)
from stepwell.trainer.config.tools import (
    ToolBoxConfig,
    ToolConfig,
)
from stepwell.trainer.config.trainer import (
    SLIME_FORM,
    TrainerConfig,
)
from stepwell.trainer.config.validation import (
    ValidationConfig,
)

__all__ = [
    "LAG_LIMIT",
    "SLIME_FORM",
    "AdvantageConfig",
    "Aggregation",
    "AlgorithmConfig",
    "AsyncTrainingConfig",
    "CustomSource",
    "DataConfig",
    "GuardConfig",
    "HarborSource",
    "HuggingFaceSource",
    "JsonlSource",
    "LossConfig",
    "Mode",
    "OffPolicyConfig",
    "OverlongBufferConfig",
    "ParquetSource",
    "PublishConfig",
    "ReasoningGymSource",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SftConfig",
    "SourceConfig",
    "TableConfig",
    "ToolBoxConfig",
    "ToolConfig",
    "TrainerConfig",
    "Truncation",
    "ValidationConfig",
    "VerifiersSource",
    "check_sampling",
    "episodes_of",
]
