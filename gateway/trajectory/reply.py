"""A generated reply, and what trainers and other gateways read of it.

    request, prompt, generation ──► Reply ──step──► Step        ids, log-probs, versions, sampling
                                      └─────note──► TurnNote    what ids do not say

Ids say what the model saw and said. They do not say of which messages, and that is what requests
are matched by. So each Step carries a note, and a gateway that did not make the Steps (a replica
that takes over, a process that was restarted) has the graph that made them. A note is a JSON object
of hashes, counts and the tool calls, which the next prompt shows; no other text. A Step without one
(an agent submitted it itself) has a `step_index` and nothing else to restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from stepwell.backends.engines.api import Sampling, TopLogProbs
from stepwell.datapool.types import Step, trusted_step
from stepwell.gateway.engine import Generation
from stepwell.gateway.prompt import ChatRequest, Prompt
from stepwell.gateway.reply.parser import ReplyText
from stepwell.gateway.tokens.graph import Calls, TurnKeys
from stepwell.gateway.tokens.messages import extend_key, text_key
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

NOTE: Final = "turn"
"""Key of a Step's metadata."""


class TurnNote(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The facts about a call that its ids do not tell. Bytes are base64 in JSON."""

    keys: TurnKeys
    retry: bytes
    """`RetryKey.digest` of the request."""
    created: int
    """Unix seconds."""
    body: bytes | None = None
    """`RetryKey.body_digest` of the request."""
    is_retry: bool = False
    """The request was marked as a retry."""
    n_forced: int = 0
    """Ids at the end of the prompt that begin the reply itself (a forced tool call)."""
    calls: Calls = ()
    has_reasoning: bool = False
    """Same as `Turn.has_reasoning`."""

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(self)
        if self.calls:
            value["calls"] = [list(call) for call in self.calls]
        return value


def read_note(step: Step) -> TurnNote | None:
    """The note of a Step; None if it has none that can be read."""
    try:
        return msgspec.convert(step.metadata.get(NOTE), TurnNote)
    except msgspec.ValidationError:  # somebody else's use of the same key
        return None


class SampledToken(NamedTuple):
    """A token as an answer with log-probs shows it."""

    token_id: int
    log_prob: float
    alternatives: TopLogProbs
    """(token id, log-prob), best first."""


@dataclass(slots=True)
class Reply:
    """The result of a call: what was asked, what was sampled, and its text."""

    request: ChatRequest
    prompt: Prompt
    sampling: Sampling
    generation: Generation
    text: ReplyText
    has_reasoning: bool
    stop_sequence: str | None
    """The request's stop string that ended the text."""

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.ids)

    @property
    def n_response(self) -> int:
        return len(self.generation.response_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.generation.finish_reason == "stop" and self.text.tool_calls:
            return "tool_calls"
        return self.generation.finish_reason

    def step(
        self, trajectory_uid: str, prompt_uid: str, index: int, metadata: Mapping[str, Any]
    ) -> Step:
        """`metadata`: what else is to be said of the call; None says nothing."""
        request, prompt, generation = self.request, self.prompt, self.generation
        params = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
        }
        if self.sampling.min_p > 0:
            params["min_p"] = self.sampling.min_p
        said = {
            **metadata,
            "sampling_params": params,
            # Log-probs are those of the unconstrained policy; the samples are not its own.
            "constraint": request.constraint[0] if request.constraint is not None else None,
            "forced_tool": request.forced_tool,
            "prefilled": True if request.prefill else None,
            "branch": prompt.cause,
        }
        # Not checked again: ids are the tokenizer's or the request's, which were read as int32, and
        # what was sampled is checked as it is read (`engine/generation.py`).
        return trusted_step(
            prompt.ids,
            generation.response_ids,
            None,  # reward
            trajectory_uid,
            prompt_uid,
            index,
            generation.policy_version,
            False,  # is_last
            {name: value for name, value in said.items() if value is not None},
            generation.log_probs,
            generation.finish_reason,
            None if prompt.parent is None else prompt.parent.nearest_step(),
            generation.spans if len(generation.spans) > 1 else (),
            None,  # multi_modal_data
            None,  # routed_experts
        )

    def note(
        self,
        tokenizer: ChatTokenizer,
        *,
        retry: bytes,
        body: bytes | None,
        is_retry: bool,
        created: int,
    ) -> TurnNote:
        """The note of its Step; the arguments are fields of it."""
        parent, attached = self.prompt.parent, self.prompt.attachment
        ids, plain, length = self.generation.response_ids, self.request.plain, None
        if plain is None:
            whole = extend_key(attached.prompt_key, self.text.message())
        else:
            if isinstance(plain, bytes):
                plain += ids.tobytes()
            else:
                plain += tokenizer.decode(ids.tolist())
            whole, length = text_key(plain), len(plain)
        return TurnNote(
            keys=TurnKeys(attached.root, attached.prompt_key, whole, length),
            retry=retry,
            created=created,
            body=body,
            is_retry=is_retry,
            n_forced=self.prompt.n_forced,
            calls=tuple((call.id, call.name, call.arguments) for call in self.text.tool_calls),
            has_reasoning=self.has_reasoning or (parent is not None and parent.has_reasoning),
        )
