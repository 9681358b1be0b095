"""Prompts: which task is rolled out next, and what data sets it comes from.

source           order, epochs, what comes back: `PromptSource`
tasks            data sets by index: what a task is, and how rows become tasks
tables           where rows lie: JSONL, Parquet, Hugging Face
prompt_length    measuring prompts
"""

from stepwell.trainer.data.source import FREE, PromptSource
from stepwell.trainer.data.tasks import Task, slug

__all__ = ["FREE", "PromptSource", "Task", "slug"]
