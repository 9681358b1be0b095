"""SGLang's `/classify` over a transformers model with a sequence-classification head: a trained
reward model's scores.

    POST /classify {"text": …} or {"input_ids": …}, one or a list
    -> {"embedding": [the logits], "meta_info": {"prompt_tokens": n, …}}, or a list of these

Source: SGLang 0.5, `/classify` of a server launched with `--is-embedding`. `__main__.py` serves
this app where the model's `architectures` name such a head. One sequence is computed at a time:
without padding a score does not depend on what else is asked. Owns the model and its routes.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Response
from pydantic import BaseModel
from transformers import AutoModelForSequenceClassification

from stepwell.backends.engines.embedded.model import DTYPES
from stepwell.backends.engines.embedded.request import InvalidRequestError
from stepwell.backends.engines.embedded.server import ServerInfo, add_error_handlers, answer

HEAD = "ForSequenceClassification"
"""How the architecture's name ends."""
LOOK_S = 0.05


def is_classifier(model_path: str) -> bool:
    """Whether its configuration names such a head."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    return any(name.endswith(HEAD) for name in config.get("architectures") or ())


class ClassifyBody(BaseModel):
    """SGLang's fields that say what is scored; its others are not read."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None


class Classifier:
    """The model and the one thread that computes with it."""

    def __init__(self, model_path: str, tokenizer: Any, dtype: str, device: str) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            model_path, dtype=DTYPES[dtype]
        )
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = device
        self.config = model.config
        self.tokenizer = tokenizer
        self.waiting = self.computed = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="classifier")

    async def classify(self, body: ClassifyBody) -> list[dict[str, Any]]:
        """
        Raises:
            InvalidRequestError: nothing to score, or more tokens than the model has positions.
        """
        scored = [self._checked(ids) for ids in self._sequences(body)]
        loop = asyncio.get_running_loop()
        self.waiting += len(scored)
        try:
            logits = [await loop.run_in_executor(self._thread, self._logits, ids) for ids in scored]
        finally:
            self.waiting -= len(scored)
        return [
            {
                "embedding": row,
                "meta_info": {"id": uuid.uuid4().hex, "prompt_tokens": len(ids)},
            }
            for ids, row in zip(scored, logits, strict=True)
        ]

    def _sequences(self, body: ClassifyBody) -> list[list[int]]:
        if (body.text is None) == (body.input_ids is None):
            raise InvalidRequestError("send either text or input_ids")
        if body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            return [list(self.tokenizer(text)["input_ids"]) for text in texts]
        many = [ids for ids in body.input_ids or [] if isinstance(ids, list)]
        return many or [[i for i in body.input_ids or [] if isinstance(i, int)]]

    def _checked(self, ids: list[int]) -> list[int]:
        most = getattr(self.config, "max_position_embeddings", None)
        if not ids or (most and len(ids) > most):
            raise InvalidRequestError(
                f"input_ids has {len(ids)} tokens; it should have 1 to {most or 'any number'}"
            )
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise InvalidRequestError(f"input_ids should be within [0, {vocabulary})")
        return ids

    def _logits(self, ids: list[int]) -> list[float]:
        input_ids = torch.tensor([ids], device=self._device)
        out = self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        self.computed += 1
        logits: list[float] = out.logits[0].float().tolist()
        return logits

    async def progress(self) -> None:
        """Returns once something is computed, or has not to be."""
        before = self.computed
        while self.waiting and self.computed == before:  # noqa: ASYNC110 - another thread's counter
            await asyncio.sleep(LOOK_S)


def create_app(classifier: Classifier, info: ServerInfo, weight_version: str) -> FastAPI:
    app = FastAPI(title="Stepwell embedded reward model")
    add_error_handlers(app)

    @app.post("/classify")
    @app.put("/classify")
    async def classify(body: ClassifyBody) -> Response:
        scored = await classifier.classify(body)
        one = isinstance(body.text, str) or (body.input_ids and isinstance(body.input_ids[0], int))
        return answer(scored[0] if one else scored)

    @app.post("/generate")
    async def generate() -> Response:
        raise InvalidRequestError("this is a reward model, which generates nothing: POST /classify")

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/health_generate")
    async def computes() -> Response:
        await classifier.progress()
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return answer(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.tokenizer_path,
                "is_generation": False,
                "weight_version": weight_version,
                "model_type": classifier.config.model_type,
                "architectures": classifier.config.architectures or [],
            }
        )

    return app
