"""`python -m benchmarks engine-decode`: tokens/s of the embedded engine, and of transformers'
continuous batching.

Random Qwen3 (hidden 128, 4 layers, 4 heads / 2 KV heads, intermediate 384, vocabulary 512), one
thread, prompts of 150 random tokens, 128 new tokens each, temperature 1, all requests at once.
Each figure is the best of `--repeat` runs: other load on the machine only ever slows a run.

    scheduler   the engine's own loop, in process
    cb          transformers' ContinuousBatchingManager, per-request processors, log-probs on
    http        the engine's server, plain responses        stream   the same, cumulative SSE
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from benchmarks.checks import BenchResult

Via: TypeAlias = Literal["scheduler", "cb", "http", "stream"]
PROMPT, NEW, VOCAB = 150, 128, 512


def make_model(path: Path) -> None:
    """A random model with a byte-level tokenizer, as a Hugging Face directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [a + b for a in alphabet[:16] for b in alphabet[:16]][: VOCAB - len(alphabet) - 1]
    vocab = {token: i for i, token in enumerate(["<eos>", *alphabet, *extra])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast  # transformers is untyped
    wrap(tokenizer_object=core, eos_token="<eos>").save_pretrained(path)
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def prompts(n: int) -> list[list[int]]:
    return [[random.randrange(1, VOCAB) for _ in range(PROMPT)] for _ in range(n)]


def scheduler_run(path: Path) -> Callable[[int], None]:
    import torch

    from stepwell.backends.engines.embedded.model import ModelRunner
    from stepwell.backends.engines.embedded.reply import StopStrings
    from stepwell.backends.engines.embedded.request import Request, SamplingParams
    from stepwell.backends.engines.embedded.scheduler import Scheduler

    torch.set_num_threads(1)
    scheduler = Scheduler(ModelRunner(str(path)), stop_strings=StopStrings(None))

    def run(n: int) -> None:
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        for i, prompt in enumerate(prompts(n)):
            request = Request(f"r{i}", prompt, params, return_logprob=True)
            scheduler.validate(request)
            scheduler.submit(request)
        while scheduler.has_work:
            scheduler.step()
            scheduler.take_changed()

    return run


def cb_run(path: Path) -> Callable[[int], None]:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    # Any id outside the vocabulary: nothing ends a request before NEW tokens.
    options: Any = GenerationConfig  # transformers is untyped
    sampling = options(max_new_tokens=NEW, do_sample=True, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(
        num_blocks=256,
        max_batch_tokens=2048,
        page_size=64,
        return_logprobs=True,
        per_request_processors=True,
    )

    def run(n: int) -> None:
        out = model.generate_batch(
            inputs=prompts(n),
            generation_config=sampling,
            continuous_batching_config=config,
            progress_bar=False,
        )
        lengths = {len(o.generated_tokens) for o in out.values()}
        if lengths != {NEW} or len(out) != n:
            raise RuntimeError(f"continuous batching returned {len(out)} outputs of {lengths}")

    return run


def http_run(url: str, *, stream: bool) -> Callable[[int], None]:
    import aiohttp

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True},
            "return_logprob": True,
            "stream": stream,
        }
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            await response.read()

    async def all_of(n: int) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session, p) for p in prompts(n)))

    return lambda n: asyncio.run(all_of(n))


def measure(run: Callable[[int], None], n: int, repeat: int) -> float:
    """Best tokens/s of `repeat` runs."""
    best = 0.0
    for _ in range(repeat):
        start = time.perf_counter()
        run(n)
        best = max(best, n * NEW / (time.perf_counter() - start))
    return best


async def run(
    *,
    via: Sequence[Via] = get_args(Via),
    requests: Annotated[Sequence[int], "how many at once"] = (1, 8, 32, 64),
    repeat: Annotated[int, "runs of each, of which the best counts"] = 3,
    stream_interval: Annotated[int, "tokens between two events of the server"] = 1,
) -> BenchResult:
    """Tokens/s by way and number of requests; none has a bound."""
    rows = await asyncio.to_thread(_measure_all, via, requests, repeat, stream_interval)
    return BenchResult({}, {"tokens/s by concurrent requests": rows})


def _measure_all(
    via: Sequence[Via], requests: Sequence[int], repeat: int, stream_interval: int
) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        path = Path(folder)
        make_model(path)
        with _server(folder, stream_interval) as url:
            makers: dict[Via, Callable[[], Callable[[int], None]]] = {
                "scheduler": lambda: scheduler_run(path),
                "cb": lambda: cb_run(path),
                "http": lambda: http_run(url, stream=False),
                "stream": lambda: http_run(url, stream=True),
            }
            for way in via:
                generate = makers[way]()
                generate(2)
                speed = {str(n): measure(generate, n, repeat) for n in requests}
                rows.append({"via": way, **speed})
    return rows


@contextmanager
def _server(model: str, stream_interval: int) -> Iterator[str]:
    """The address of an engine of its own process."""
    command = [sys.executable, "-m", "stepwell.backends.engines.embedded", "--port", "0"]
    command += ["--model-path", model, "--stream-interval", str(stream_interval)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread) as server:
        try:
            line = server.stdout.readline() if server.stdout is not None else ""
            if "http" not in line:
                raise RuntimeError(f"the engine did not start: {line!r}")
            yield line.split()[-1]
        finally:
            server.terminate()
