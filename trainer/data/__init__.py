"""Prompts: which task is rolled out next, and what data sets it comes from.

source           order, epochs, what comes back: `PromptSource`
tasks            data sets by index: what a task is, and how rows become tasks
tables           where rows lie: JSONL, Parquet, Hugging Face
columns          which columns are read, and as what
harbor           Harbor's task folders
custom           rows of a class of the user's
prompt_length    measuring prompts
conversations    rows of messages as Steps, for SFT
"""

from stepwell.trainer.data.conversations import Conversations, open_conversations
from stepwell.trainer.data.source import FREE, PromptSource
from stepwell.trainer.data.tasks import Task, slug

__all__ = ["FREE", "Conversations", "PromptSource", "Task", "open_conversations", "slug"]
