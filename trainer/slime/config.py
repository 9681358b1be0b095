"""Settings that Stepwell takes from slime's arguments: the pool that is trained on, and where
prompts lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepwell.datapool.types import TRAIN, VAL
from stepwell.trainer.config import JsonlSource, ParquetSource
from stepwell.trainer.errors import ConfigError

PREFIX = "stepwell_"
_ROWS = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")
"""A path with a range of its rows, as Python's slices count them (slime's form)."""


class SlimeConfig(BaseModel):
    """Stepwell's keys in slime's `--custom-config-path`, each with `stepwell_` before it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: str = "data_pool"
    """Name of the pool's actor."""
    namespace: str | None = None
    """Its Ray namespace: `stepwell-NAME` for the pool of `run.name=NAME`; null = slime's own."""
    channel: str = TRAIN
    """To train on. This run is its only consumer: leases left by an earlier one are taken back."""
    val_channel: str = VAL
    """To evaluate on."""
    val_groups: int | None = Field(default=None, ge=1)
    """Groups of an evaluation, waited for; null = those that are ready when it begins."""
    lease_s: float = Field(default=600.0, gt=0)
    """Seconds that groups stay leased after the rollout manager's process died; renewed while it
    lives. A restart gives them back at once."""
    log_raw_info: str | None = None
    """Dotted path of a function (args, all_meta_info, rollout_id) that logs what a Rollout Buffer
    tells of a rollout; null = `stepwell.trainer.slime.buffer.log_raw_info`."""

    @classmethod
    def of(cls, args: Any) -> SlimeConfig:
        """Reads slime's arguments.

        Raises:
            ConfigError: a `stepwell_` name that is unknown, or a wrong value.
        """
        given = {
            name.removeprefix(PREFIX): value
            for name, value in vars(args).items()
            if name.startswith(PREFIX)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as e:
            problems = "\n".join(
                f"{PREFIX}{'.'.join(map(str, p['loc']))} is {p['input']!r:.80}: {p['msg']}"
                for p in e.errors()
            )
            known = ", ".join(PREFIX + name for name in cls.model_fields)
            raise ConfigError(f"{problems} (known: {known})") from e


def prompt_data(args: Any) -> tuple[JsonlSource | ParquetSource, slice] | None:
    """Data source of slime's prompts, and which of its rows (`data.jsonl@[0:1000]`); None with
    `--disable-rollout-global-dataset`, or without `--prompt-data`."""
    if not args.rollout_global_dataset or args.prompt_data is None:
        return None
    path, rows = str(args.prompt_data), slice(None)
    if (match := _ROWS.fullmatch(path)) is not None:
        path, *bounds = match.groups()
        rows = slice(*(int(bound) if bound else None for bound in bounds))
    kind = ParquetSource if path.endswith(".parquet") else JsonlSource
    source = kind(
        kind="parquet" if kind is ParquetSource else "jsonl",
        path=Path(path),
        prompt_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        shuffle=args.rollout_shuffle,
        shuffle_seed=args.rollout_seed,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
    )
    return source, rows


def folder(args: Any, name: str) -> Path | None:
    """The folder that slime's argument `name` names."""
    value = getattr(args, name, None)
    return None if value is None else Path(value)
