"""The address that a generate function of slime knows an engine by, one for each rollout.

    function ── POST http://{sglang_router_ip}:{sglang_router_port}/generate ──► EngineAddress
                SGLang's body and answer                                             │
                                          gateway's POST /generate, with its key ◄───┘

slime's functions name a host and a port and nothing else: neither a key nor the rollout that they
call for. So each rollout has a port of its own on loopback, and its calls go where all calls go:
through the gateway, which chooses the engine, goes on over weight updates and lost engines, and
samples as the rollout's channel says. What the engine sampled is kept (`calls`). Whoever is on the
machine may call the port while the rollout runs.

Source of the wire format: SGLang 0.5.23, `GenerateReqInput`. Does not own: Steps (`masked.py`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from stepwell.datapool.types import VersionSpan
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.rollout.gateway import ClosedError, GatewayClient
from stepwell.trainer.slime.masked import EngineCall

HOST = "127.0.0.1"
_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""SGLang's sampling parameters that the gateway knows by another name."""
_TEXT_ONLY = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens")
"""Parameters of the answer's text; its ids do not depend on them."""
_NOTHING: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_text_in_logprobs": (False,),
    "return_routed_experts": (False,),
    "image_data": (None,),
    "custom_params": (None, {}),
}
"""Values of further fields that ask for nothing beyond the ids."""


class EngineAddress:
    """Serves one rollout's calls while it is entered.

    Args:
        identity: `trajectory_uid` and `prompt_uid` of the rollout.
        origin: of the gateway that serves it.
        tokenizer: transformers' tokenizer of the served model.
    """

    def __init__(
        self, gateway: GatewayClient, origin: str, identity: Mapping[str, str], tokenizer: Any
    ) -> None:
        self.calls: list[EngineCall] = []
        """Answered so far, in the order of their answers."""
        self.refusal = ""
        """Reason of the last refusal; slime's client tries again and does not tell it."""
        self.port = 0
        self._gateway = gateway
        self._origin = origin
        self._identity = dict(identity)
        self._tokenizer = tokenizer
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            if (request.method, request.path) != ("POST", "/generate"):
                raise RolloutError(
                    f"{request.method} {request.path} is not served for functions of slime's form; "
                    "they call POST /generate. An agent that speaks a chat API is written as async "
                    "def agent(task, base_url, api_key)"
                )
            body = json.loads(
                await request.content.read()
            )  # of any size: the gateway has the limit
            return web.json_response(await self._generate(body))
        except ClosedError as e:
            status, self.refusal = 409, str(e)
        except (RolloutError, ValueError) as e:
            status, self.refusal = 400, str(e)
        return web.json_response({"error": {"message": self.refusal}}, status=status)

    async def _generate(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise RolloutError(f"the body is {body!r:.80}; send an object, as SGLang takes it")
        asked = dict(body)
        params: dict[str, Any] = dict(asked.pop("sampling_params", None) or {})
        wants_log_probs = asked.pop("return_logprob", False)
        rid = asked.pop("rid", None) or uuid.uuid4().hex
        prompt_ids = self._prompt(asked.pop("input_ids", None), asked.pop("text", None))
        for name, value in asked.items():
            if value not in _NOTHING.get(name, ()):
                raise RolloutError(f"{name} is {value!r:.80}, which is not served; leave it out")
        shown = {name: params.pop(name) for name in _TEXT_ONLY if name in params}
        if params.get("custom_params") in _NOTHING["custom_params"]:
            params.pop("custom_params", None)
        wanted = {_NAMES.get(name, name): v for name, v in params.items() if v is not None}
        answer = await self._gateway.ask(
            f"{self._origin}/generate",
            {**wanted, **self._identity, "prompt_ids": prompt_ids},
            headers={"idempotency-key": uuid.uuid4().hex},
            is_generation=True,
        )
        call = EngineCall(
            prompt_ids=answer["prompt_ids"],
            response_ids=answer["response_ids"],
            log_probs=answer["rollout_log_probs"],
            spans=[VersionSpan(**span) for span in answer["version_spans"]],
            sampling_params=answer["sampling_params"],
        )
        self.calls.append(call)
        return self._in_sglangs_form(
            call, rid, answer["finish_reason"], params, shown, wants_log_probs
        )

    def _prompt(self, ids: Any, text: Any) -> list[int]:
        if (ids is None) == (text is None):
            raise RolloutError("send the prompt as input_ids or as text, one of them")
        if text is None:
            prompt: list[int] = ids
            return prompt
        if not isinstance(text, str):
            raise RolloutError(f"text is {text!r:.80}; send one prompt a call")
        encoded: list[int] = self._tokenizer.encode(text)
        return encoded

    def _in_sglangs_form(
        self,
        call: EngineCall,
        rid: str,
        reason: str,
        params: Mapping[str, Any],
        shown: Mapping[str, Any],
        wants_log_probs: bool,
    ) -> dict[str, Any]:
        ids = list(call.response_ids)
        version = min(span.version for span in call.spans)
        ended = {"length": len(ids)} if reason == "length" else {}
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": reason, **ended},
            "prompt_tokens": len(call.prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(version),
        }
        if wants_log_probs:
            entries = zip(call.log_probs, ids, strict=True)
            meta["output_token_logprobs"] = [[log_prob, i, None] for log_prob, i in entries]
        return {"text": self._text(ids, params, shown), "output_ids": ids, "meta_info": meta}

    def _text(self, ids: list[int], params: Mapping[str, Any], shown: Mapping[str, Any]) -> str:
        trims = not shown.get("no_stop_trim", False)
        stop_ids = {self._tokenizer.eos_token_id, *(params.get("stop_token_ids") or ())}
        if trims and ids and ids[-1] in stop_ids:
            ids = ids[:-1]
        text = str(
            self._tokenizer.decode(
                ids,
                skip_special_tokens=shown.get("skip_special_tokens", True),
                spaces_between_special_tokens=shown.get("spaces_between_special_tokens", True),
            )
        )
        stops = params.get("stop") or ()
        for stop in (stops,) if isinstance(stops, str) else stops:
            if trims and stop in text:
                text = text[: text.index(stop)]
        return text
