"""Continuous batching: which requests run, one step at a time. No threads, no HTTP, no clock.

One `step`::

    admit      waiting requests take free rows; shared prefixes are copied, not recomputed
    prefill    at most `PREFILL_BUDGET` prompt tokens, so that a long prompt cannot stall the others
    decode     one token for every request whose prompt is done

A request whose prefix is being computed by another one in this very step waits for that copy: of
a GRPO group only the first rollout computes the common prompt.

Pause and weight update (SGLang's semantics)::

    running ──pause(in_place)──► held; KV kept; goes on under new weights on its old KV
            ──pause(retract)───► waiting; KV dropped; recomputed under new weights
            ──pause(abort)─────► finished: abort, with the tokens it has
    update without pause: running requests finish on the old weights, waiting ones wait for the new

Retained prefixes never outlive an update, whatever `flush_cache` says: a Step must not carry a
version whose weights did not compute its KV. Only `in_place` mixes, and its spans say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from stepwell.backends.config import PauseMode
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.request import InvalidRequestError, Request
from stepwell.backends.engines.embedded.sampling import sample
from stepwell.backends.engines.embedded.vision import Vision

PREFILL_BUDGET = 2048
"""Padded prompt tokens computed between two decode steps."""


class Scheduler:
    """Owns every request in flight, the model and the weight version."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        stop_strings: StopStrings,
        weight_version: str = "0",
        model_path: str = "",
        extra_eos_ids: Iterable[int] = (),
        seed: int = 0,
        paused: bool = False,
    ) -> None:
        self.runner = runner
        self.cache = runner.cache
        self.weight_version = weight_version
        self.model_path = model_path
        self.eos_ids = runner.eos_ids | frozenset(extra_eos_ids)
        self.paused = paused
        self.released = False
        """Its memory is lent to somebody else."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Index = cache row."""
        self.by_rid: dict[str, Request] = {}
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.reused_tokens = 0
        self._stop_strings = stop_strings
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)
        self._changed: list[Request] = []
        """Requests that changed since the last `take_changed`."""

    # -- commands -----------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Check a request against the model; sets its token limit. May be called from any thread.

        Raises:
            InvalidRequestError: with SGLang's wording where SGLang refuses it too.
        """
        n, context = len(request.prompt_ids), self.runner.context_length
        if not n:
            raise InvalidRequestError("input_ids is empty; send at least one token")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.runner.vocab_size:
            raise InvalidRequestError(
                f"The input_ids hold values outside the vocabulary [0, {self.runner.vocab_size})."
            )
        if n >= context:
            raise InvalidRequestError(
                f"The input ({n} tokens) is longer than the model's context length "
                f"({context} tokens)."
            )
        wanted = request.params.max_new_tokens
        if wanted is not None and n + wanted > context:
            raise InvalidRequestError(
                "Requested token count exceeds the model's maximum context length of "
                f"{context} tokens. You requested a total of {n + wanted} tokens: {n} tokens from "
                f"the input messages and {wanted} tokens for the completion. Please reduce the "
                "number of tokens in the input messages or the completion to fit within the limit."
            )
        request.limit = context - n if wanted is None else wanted

    def submit(self, request: Request) -> None:
        self.by_rid[request.rid] = request
        self.waiting.append(request)

    def abort(self, rid: str | None, message: str = "Aborted") -> None:
        """Abort the request `rid` and, as SGLang does, those whose id starts with it; nothing
        happens if there is no request of that id. All if `rid` is None."""
        if rid is not None and rid not in self.by_rid:
            return
        chosen = [r for r in self.by_rid.values() if rid is None or r.rid.startswith(rid)]
        for request in chosen:
            self.cancel(request, message)

    def cancel(self, request: Request, message: str = "Aborted") -> None:
        """Abort one request; nothing happens if it has finished."""
        if not request.finished:
            request.abort(message)
            self._remove(request)

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for request in reversed(self.running.copy()):
                self._release(request, retain=False)
                request.num_retractions += 1
                self.waiting.appendleft(request)

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Drop retained KV; refused (False) while there are requests, as SGLang does."""
        if self.running or self.waiting:
            return False
        self.cache.forget_retained()
        return True

    def release(self) -> None:
        """Lend the memory of an idle engine to a trainer: the KV cache is dropped, the weights wait
        in the host's memory. Requests that a pause keeps waiting go on waiting.

        Raises:
            InvalidRequestError: requests run, or it was released before; a real SGLang dies.
        """
        if self.running or (self.waiting and not self.paused):
            raise InvalidRequestError(
                f"{len(self.running)} requests run and {len(self.waiting)} wait; "
                "release_memory_occupation is for an idle server: pause it with mode abort first"
            )
        if self.released:
            raise InvalidRequestError("its memory has been released already")
        self.cache.drop()
        self.runner.offload()
        self.released = True

    def take_back(self, tags: Sequence[str] = ()) -> None:
        """End `release`, with the weights as they were.

        Args:
            tags: SGLang's names: with `weights` the model is loaded again, and nothing generated
                until the rest (`kv_cache`) is taken back. Empty: all.

        Raises:
            InvalidRequestError: it was not released; a real SGLang dies.
        """
        if not self.released:
            raise InvalidRequestError("its memory has not been released")
        if not tags or "weights" in tags:
            self.runner.reload()
        self.released = bool(tags) and "kv_cache" not in tags

    def update_weights(self, path: str, version: str | None) -> None:
        """Load new weights; `version` None keeps the present version's name.

        Raises:
            WeightLoadError: the old weights and KV still serve, unchanged.
        """
        self.runner.load_weights(path)
        self.model_path = path
        self._weights_changed(version)

    def update_tensors(self, tensors: Mapping[str, torch.Tensor], version: str | None) -> None:
        """Likewise, with some or all of the model's tensors themselves."""
        self.runner.load_tensors(tensors)
        self._weights_changed(version)

    def load_adapter(self, name: str, path: str) -> None:
        """Likewise, with a LoRA adapter in place of any other; the version keeps its name."""
        self.runner.adapters.load(name, path)
        self._weights_changed(None)

    def unload_adapter(self, name: str) -> None:
        """Likewise, back to the weights without one."""
        self.runner.adapters.unload(name)
        self._weights_changed(None)

    def _weights_changed(self, version: str | None) -> None:
        if version is not None:
            self.weight_version = version
        self.cache.mark_stale()
        for request in self.by_rid.values():
            if request.vision is not None:
                request.vision.forget()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting) and not self.paused and not self.released

    @property
    def held(self) -> int:
        """Requests that a pause holds."""
        return len(self.by_rid) if self.paused else 0

    def take_changed(self) -> list[Request]:
        """Requests with news since the last call, each once."""
        changed, self._changed = self._changed, []
        return changed

    # -- one step -----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> None:
        """Admit, prefill, decode. `admit=False` lets the running requests drain."""
        budget = PREFILL_BUDGET
        while True:
            admitted = self._admit() if admit else 0
            spent = self._prefill(budget)
            budget -= spent
            if budget <= 0 or not (admitted or spent):
                break
        self._decode()

    def _admit(self) -> int:
        postponed: list[Request] = []
        admitted = 0
        while self.waiting and len(self.running) < self.cache.max_running:
            request = self.waiting.popleft()
            if request.adapter not in (None, self.runner.adapters.name):
                self._refuse(request)
                continue
            tokens = request.token_ids()
            reusable = len(tokens) - 1
            if self.cache.worth_waiting(tokens[:reusable], request.salt):
                postponed.append(request)
                continue
            row = self.cache.acquire(tokens, reusable, request.salt)
            request.row = row
            self.running.append(request)
            admitted += 1
            reused = int(self.cache.kv_len[row])
            self.reused_tokens += reused
            if not request.output_ids:
                request.cached_tokens = reused
        self.waiting.extendleft(reversed(postponed))
        return admitted

    def _refuse(self, request: Request) -> None:
        """End a request for an adapter that is not loaded. One that waits in a pause may find it
        when it goes on."""
        loaded = self.runner.adapters.name
        request.abort(
            f"lora_path is {request.adapter!r}, which is not loaded; {loaded!r} is", status=400
        )
        self._remove(request)

    def _todo(self, row: int) -> int:
        """Known tokens of a row that have no KV yet; 1 when it only waits to decode."""
        return self.running[row].length - int(self.cache.kv_len[row])

    def _prefilling(self, row: int) -> bool:
        request = self.running[row]
        return self._todo(row) > 1 or not request.output_ids

    def _prefill(self, budget: int) -> int:
        """One forward over rows that still have prompt tokens; returns the tokens spent. The
        oldest such row sets the width; rows less than half as long would mostly be padding."""
        rows = [r for r in range(len(self.running)) if self._prefilling(r)]
        if not rows or budget <= 0:
            return 0
        width = min(self._todo(rows[0]), budget)
        rows = [r for r in rows if 2 * self._todo(r) >= width][: max(1, budget // width)]
        lengths = np.array([min(width, self._todo(r)) for r in rows])
        starts = self.cache.kv_len[rows].copy()
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, width - lengths[i] :] = self.cache.tokens[
                row, starts[i] : starts[i] + lengths[i]
            ]
        logits = self.runner.forward(np.array(rows), ids, starts, lengths, self._visions(rows))
        self.prefilled_tokens += int(lengths.sum())
        done = [i for i, row in enumerate(rows) if self._todo(row) == 0]
        if done:
            requests = [self.running[rows[i]] for i in done]
            self._extend(requests, logits[done])
        return len(rows) * width

    def _decode(self) -> None:
        n = len(self.running)
        ready = [row for row in range(n) if not self._prefilling(row)]
        if not ready:
            return
        # Rows still in prefill ride along, so that the batch stays a slice: they write at their
        # next free position, which their next chunk overwrites, and keep their length.
        starts = self.cache.kv_len[:n].copy()
        ids = np.zeros((n, 1), dtype=np.int64)
        for row in ready:
            ids[row, 0] = self.running[row].output_ids[-1]
        ones = np.ones(n, dtype=np.int64)
        logits = self.runner.forward(np.arange(n), ids, starts, ones, self._visions(range(n)))
        requests = [self.running[row] for row in ready]
        if len(ready) < n:
            lagging = np.setdiff1d(np.arange(n), ready)
            self.cache.kv_len[lagging] = starts[lagging]
            logits = logits[ready]
        self._extend(requests, logits)

    def _visions(self, rows: Iterable[int]) -> list[Vision | None]:
        return [self.running[row].vision for row in rows]

    def _extend(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Sample the next token of each request and finish those that end with it."""
        sampled = sample(logits, requests, self._generator)
        for i, request in enumerate(requests):
            if request.limit > 0:
                token = sampled.ids[i]
                request.append(token, sampled.log_probs[i], sampled.top[i], self.weight_version)
                self.generated_tokens += 1
            reason = self._finish_reason(request)
            if reason is not None:
                request.finish_reason = reason
                self._remove(request)
            else:
                self.cache.ensure_capacity(request.length)
                self.cache.tokens[request.row, request.length - 1] = request.output_ids[-1]
                self._changed.append(request)

    def _finish_reason(self, request: Request) -> dict[str, object] | None:
        """SGLang's order: length, then end ids, then stop strings."""
        if len(request.output_ids) >= request.limit:
            return {"type": "length", "length": len(request.output_ids)}
        token, params = request.output_ids[-1], request.params
        if not params.ignore_eos and (token in self.eos_ids or token in params.stop_token_ids):
            return {"type": "stop", "matched": token}
        matched = self._stop_strings.match(request.output_ids, params.stop) if params.stop else None
        return {"type": "stop", "matched": matched} if matched is not None else None

    def _remove(self, request: Request) -> None:
        """Take a finished request out, wherever it is."""
        self.by_rid.pop(request.rid, None)
        if request.row >= 0:
            self._release(request, retain=True)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._changed.append(request)

    def _release(self, request: Request, *, retain: bool) -> None:
        moved = self.cache.release(request.row, retain=retain)
        last = self.running.pop()
        if moved is not None:
            self.running[request.row], last.row = last, request.row
        request.row = -1
