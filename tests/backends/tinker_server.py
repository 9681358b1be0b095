"""A server of Tinker's API for one model on this CPU, so that the real SDK can be run against it.

    forward_backward (protobuf) ──► cross entropy of Σ -log π · weights, its gradient gathered
    optim_step                  ──► AdamW, gradient clipped
    save_weights, load_weights  ──► a checkpoint in memory, with the optimizer

With a rank it trains adapters (peft), as Tinker does; without one every weight, so that a step can
be held against one of our own backend. Answers are futures that the SDK asks for, as at Tinker.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

PROTO = "application/x-protobuf"


class TinkerServer:
    """See the module's docstring."""

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        self._folder, self._rank = folder, rank
        self._models: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
        self._exported: dict[str, bytes] = {}
        self._sessions = 0
        self.url = ""
        self.calls: list[str] = []
        self.params: list[dict[str, Any]] = []
        """Parameters of each optimizer step."""
        self.refusal: str | None = None
        """Error that the next forward pass ends with."""
        self._results: dict[str, tuple[bytes, str] | dict[str, Any]] = {}
        self._saved: dict[str, Any] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self.url
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path.removeprefix("/api/v1/")
        self.calls.append(path)
        body = await request.read()
        if path == "forward_backward":
            return self._promise(self._forward_backward(body))
        if path in self._exported:
            return web.Response(body=self._exported[path])
        if path.endswith("external_weights_urls"):
            urls = {p.rpartition("/")[2]: f"{self.url}{p}" for p in self._exported}
            return web.json_response({"urls": urls, "expires": "2099-01-01T00:00:00Z"})
        if path.endswith("/finish"):
            return web.json_response({})
        given: dict[str, Any] = await request.json() if body else {}
        match path:
            case "client/config" | "client/dynamic_config" | "session_heartbeat":
                return web.json_response({"type": path})
            case "telemetry":
                return web.json_response({"status": "accepted"})
            case "create_session":
                self._sessions += 1
                session = f"s{self._sessions}"
                return web.json_response({"type": "create_session", "session_id": session})
            case "get_info":
                data = {"arch": "qwen3", "model_name": "m", "tokenizer_id": "m"}
                answer = {"type": "get_info", "model_id": given["model_id"], "model_data": data}
                return web.json_response({**answer, "is_lora": True, "lora_rank": 8})
            case "retrieve_future":
                result = self._results[given["request_id"]]
                if isinstance(result, tuple):
                    return web.Response(body=result[0], content_type=result[1])
                return web.json_response(result)
            case "create_model":
                return self._promise({"type": "create_model", "model_id": self._create(given)})
            case "optim_step":
                return self._promise(self._optim_step(given["model_id"], given["adam_params"]))
            case "save_weights":
                name = f"tinker://{given['model_id']}/weights/{given['path']}"
                model, optimizer = self._models[given["model_id"]]
                self._saved[name] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                return self._promise({"type": "save_weights", "path": name})
            case "load_weights":
                model_id = given.get("model_id") or self._create(given)
                model, optimizer = self._models[model_id]
                weights, moments = copy.deepcopy(self._saved[given["path"]])
                model.load_state_dict(weights)
                if given["optimizer"]:
                    optimizer.load_state_dict(moments)
                done = {"type": "load_weights", "path": given["path"], "model_id": model_id}
                return self._promise(done)
            case "save_weights_external":
                self._export(given["model_id"])
                name = f"tinker://{given['model_id']}/external_weights/{given['path']}"
                return self._promise({"type": "save_weights_external", "path": name})
            case "weights_info":
                return web.json_response({"base_model": "m", "is_lora": True, "lora_rank": 4})
        return web.json_response({"error": f"{request.method} {request.path}"}, status=404)

    def _promise(self, result: Any) -> web.Response:
        name = f"r{len(self._results)}"
        self._results[name] = result
        return web.json_response({"request_id": name})

    def _create(self, given: dict[str, Any]) -> str:
        """Make a model under the name that the SDK expects of it."""
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        if self._rank is not None:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=self._rank, target_modules="all-linear"))
        trained = [p for p in model.parameters() if p.requires_grad]
        name = f"{given['session_id']}:train:{given['model_seq_id']}"
        self._models[name] = (model, torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0))
        return name

    def _export(self, model_id: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._models[model_id][0].save_pretrained(folder)
            files = [file for file in Path(folder).iterdir() if file.is_file()]
            self._exported = {f"/files/{file.name}": file.read_bytes() for file in files}

    def _forward_backward(self, body: bytes) -> tuple[bytes, str] | dict[str, Any]:
        from tinker.proto import tinker_public_pb2 as pb

        asked = pb.ForwardBackwardRequest()
        asked.ParseFromString(body)
        assert asked.loss_fn == "cross_entropy", asked.loss_fn
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            return {"error": refusal, "category": "server"}
        model = self._models[asked.model_id][0]
        out = pb.ForwardBackwardOutput(loss_fn_output_type="CrossEntropyOutput")
        record = out.loss_fn_outputs.add(num_datums=len(asked.data))
        rows, offsets, total = [], [0], 0.0
        with torch.set_grad_enabled(not asked.forward_only):
            for datum in asked.data:
                ids = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
                tokens = torch.from_numpy(np.frombuffer(ids, np.int32).astype(np.int64))
                target = datum.loss_fn_inputs["target_tokens"].dense
                targets = torch.from_numpy(np.frombuffer(target, np.int64).copy())
                weight = datum.loss_fn_inputs["weights"].dense
                weights = torch.from_numpy(np.frombuffer(weight, np.float32).copy())
                logits = model(tokens[None]).logits[0].float()
                log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
                loss = -(log_probs * weights).sum()
                if not asked.forward_only:
                    loss.backward()
                total += float(loss.detach())
                rows.append(log_probs.detach().numpy().astype(np.float32))
                offsets.append(offsets[-1] + rows[-1].nbytes)
        field = record.fields["logprobs"]
        field.data = b"".join(row.tobytes() for row in rows)
        field.offsets = np.asarray(offsets, np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        out.metrics["loss:sum"] = total
        return out.SerializeToString(), PROTO

    def _optim_step(self, model_id: str, params: dict[str, Any]) -> dict[str, Any]:
        self.params.append(params)
        model, optimizer = self._models[model_id]
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = params["learning_rate"], (params["beta1"], params["beta2"])
        group["eps"], group["weight_decay"] = params["eps"], params["weight_decay"]
        most = params["grad_clip_norm"] or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), most))
        optimizer.step()
        optimizer.zero_grad()
        return {"type": "optim_step", "metrics": {"grad_norm": norm}}
