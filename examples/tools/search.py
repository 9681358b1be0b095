"""Search over a local corpus by BM25 (`bm25s`): a tool with configuration, state and a reward.

The corpus is a JSONL file with one {"id", "title", "text"} per line, indexed once per process. The
task may say which documents an answer needs (`tools_kwargs.search.create_kwargs.relevant`); the
tool's reward is the share of them that the rollout has found.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stepwell.trainer.tools import Tool, ToolConfigError


class Search(Tool):
    """`config`: corpus (path of the JSONL file), k (documents per query, default 3)."""

    name = "search"

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, tool_schema)
        self._path = Path(self.config["corpus"])
        self._k = int(self.config.get("k", 3))
        self._relevant: dict[str, frozenset[str]] = {}
        self._found: dict[str, set[str]] = {}
        if not self.documents:
            raise ToolConfigError(f"corpus is {str(self._path)!r}, which holds no documents")

    @cached_property
    def documents(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]

    async def create(
        self, instance_id: str | None = None, relevant: Sequence[str] = (), **kwargs: Any
    ) -> str:
        instance_id = instance_id or uuid.uuid4().hex
        self._relevant[instance_id] = frozenset(relevant)
        self._found[instance_id] = set()
        return instance_id

    async def call(
        self,
        instance_id: str,
        query: Annotated[str, Field(description="words to look for", min_length=1)],
    ) -> str:
        """Search the document collection. Returns the best documents with their ids."""
        found = self.search(query)
        self._found[instance_id].update(d["id"] for d in found)
        if not found:
            return "no document matches"
        return show(found)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The share of the relevant documents that were found; None: the task names none."""
        relevant = self._relevant[instance_id]
        if not relevant:
            return None
        return len(relevant & self._found[instance_id]) / len(relevant)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._relevant[instance_id], self._found[instance_id]

    def search(self, query: str) -> list[dict[str, str]]:
        """The best `k` documents, those that share no word with `query` left out."""
        import bm25s  # only for those who search

        words = bm25s.tokenize(query, stopwords="en", show_progress=False, return_ids=False)
        k = min(self._k, len(self.documents))
        if not words[0]:
            return []
        hits, scores = self._index.retrieve(words, k=k, show_progress=False)
        return [
            self.documents[int(i)] for i, score in zip(hits[0], scores[0], strict=True) if score > 0
        ]

    @cached_property
    def _index(self) -> Any:
        import bm25s

        index = bm25s.BM25()
        texts = [f"{d['title']}\n{d['text']}" for d in self.documents]
        index.index(
            bm25s.tokenize(texts, stopwords="en", show_progress=False, return_ids=False),
            show_progress=False,
        )
        return index


def show(documents: Sequence[Mapping[str, str]]) -> str:
    """Documents as the policy reads them."""
    return "\n\n".join(f"[{d['id']}] {d['title']}\n{d['text']}" for d in documents)
