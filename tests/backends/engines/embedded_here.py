"""The embedded engine in a thread of the tests' process, for tests that only ask it: a process of
its own imports torch and transformers for three CPU seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.server import ServerInfo, create_app
from tests.backends.engines.dynamo_server import in_a_thread
from tests.gateway.conftest import serving


@contextmanager
def embedded_here(model: Path, dtype: str = "auto") -> Iterator[str]:
    """Its url; the weights are of version 0."""
    path = str(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    runner = ModelRunner(path, dtype=dtype, max_running=8, n_retained=8)
    scheduler = Scheduler(
        runner,
        stop_strings=StopStrings(tokenizer),
        weight_version="0",
        model_path=path,
        extra_eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
    )
    app = create_app(GenerationLoop(scheduler), tokenizer, ServerInfo(path, path, 1))
    with in_a_thread(serving(app)) as url:
        yield url
