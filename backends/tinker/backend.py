"""A model that Tinker trains (SDK 0.38): loop and loss here, weights and optimizer there.

    convert            rows: a sequence goes there once for all the steps that it holds
    compute_log_probs  forward
    train_step         forward_backward_custom: our loss of the log-probs it sends ► optim_step
    save_weights       save_weights_external ► its files ► a Hugging Face directory for our engines
    state_dict         save_state: the name of a checkpoint, with the optimizer

Tinker trains adapters and scores at temperature 1, and it sends no entropy, which is not reported
then: what needs others is refused by name. A loss that is not finite is not applied: its backward
pass is sent as zeros.

Owns: what is sent and what comes of it. Does not own: formulas (`trainer/algorithms/`), sampling,
which our engines do with the weights that are fetched.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor

from stepwell.backends.base import LossFn, LossOutput, Mean, TokenBatch, TrainingBackend
from stepwell.backends.config import LoraConfig, TorchBackendConfig
from stepwell.backends.errors import (
    BackendConfigError,
    BatchError,
    UnsupportedByBackendError,
)
from stepwell.backends.model_folder import WEIGHT_SUFFIXES
from stepwell.backends.rows import TokenRow, build_rows, select
from stepwell.backends.torch.optimizer import Updates
from stepwell.backends.weights.store import OWN_FILES
from stepwell.datapool.config import Section
from stepwell.datapool.types import Step

REMEDY = "pip install 'tinker>=0.38'"
ADAPTERS = "adapter_config.json"
STATE = "tinker.json"
"""File beside saved weights that names their checkpoint at Tinker."""
DOWNLOAD_S = 600.0


class TinkerOptions(Section):
    """Options of the Tinker backend. Its key is TINKER_API_KEY, in the environment."""

    base_model: str = Field(min_length=1)
    """Tinker's name of the model in `model.path`, e.g. Qwen/Qwen3-8B."""
    rank: int = Field(default=32, ge=1)
    """Rank of the adapters that Tinker trains."""
    base_url: str | None = None
    """Address of the service; null: the SDK's own, or TINKER_BASE_URL."""


@dataclass(eq=False, slots=True)
class TinkerBatch(TokenBatch):
    """A `TokenBatch` and the rows in which it is sent."""

    rows: tuple[TokenRow, ...] = ()


class TinkerBackend(TrainingBackend):
    """Trains adapters at Tinker, a service.

    Raises:
        BackendConfigError: the section asks for what is not Tinker's to do.
    """

    options = TinkerOptions
    is_remote = True
    returns_columns = True

    def __init__(self, config: TorchBackendConfig, model_path: str | Path) -> None:
        from tinker import ServiceClient

        self._options = cast(TinkerOptions, self.own_options(config.options))
        _refuse(config)
        self._config = config
        self._model_path = Path(model_path)
        self._service: Any = ServiceClient(base_url=self._options.base_url)
        self._client = self._fresh()
        self._reference: Any = None
        self._updates = Updates(config)

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> TrainingBackend:
        """See `TrainingBackend.build`; there are no ranks to place."""
        kwargs.pop("options", None)
        return cls(*args, **kwargs)

    @classmethod
    def adapters(cls, config: TorchBackendConfig) -> LoraConfig:
        """See `TrainingBackend.adapters`: of the rank in its own options."""
        return LoraConfig(rank=cast(TinkerOptions, cls.own_options(config.options)).rank)

    @classmethod
    def missing(cls) -> str | None:
        absent = importlib.util.find_spec("tinker") is None
        return f"tinker not installed: {REMEDY}" if absent else None

    def _fresh(self) -> Any:
        """A client of adapters that add nothing yet."""
        own = self._options
        created = self._service.create_lora_training_client(
            base_model=own.base_model, rank=own.rank, seed=self._config.seed
        )
        return created.result()

    def convert(self, steps: list[Step]) -> TinkerBatch:
        """Rows and flat columns of `steps`.

        Raises:
            BatchError: no steps, images, or a temperature other than 1.
        """
        batch = TinkerBatch.of(steps)
        for step in steps:
            name = f"step {step.step_index} of trajectory {step.trajectory_uid!r}"
            if step.multi_modal_data:
                raise BatchError(f"{name} has multi_modal_data; this backend trains on text only")
            if step.temperature != 1.0:
                raise BatchError(
                    f"{name} was sampled at temperature {step.temperature:g}, and Tinker scores at "
                    "1; set rollout.temperature to 1"
                )
        batch.rows = tuple(build_rows(steps, "merged"))
        return batch

    def compute_log_probs(self, batch: TinkerBatch) -> Tensor:
        """See `TrainingBackend.compute_log_probs`."""
        return self._score(self._client, batch)

    def compute_ref_log_probs(self, batch: TinkerBatch) -> Tensor:
        """See `TrainingBackend.compute_ref_log_probs`: adapters that were never trained."""
        if self._reference is None:
            self._reference = self._fresh()
        return self._score(self._reference, batch)

    def _score(self, client: Any, batch: TinkerBatch) -> Tensor:
        out = torch.zeros(batch.n_tokens)
        answer = client.forward(_data(batch.rows, weights=True), "cross_entropy").result()
        rows = [torch.as_tensor(found["logprobs"].tolist()) for found in answer.loss_fn_outputs]
        values, tokens = _responses(batch, batch.rows, rows)
        out[tokens] = values.float()
        return out

    def train_step(
        self, batch: TinkerBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step over the steps `indices` (all if None).

        Returns:
            The means that `loss_fn` reports, and `loss`, `lr`, `tokens`, `rows`, `skipped`,
            `skipped_updates`, `seconds`, and what Tinker reports of the step.

        Raises:
            UnsupportedByBackendError: the loss has an entropy bonus.
            NonFiniteUpdateError: more than `MAX_SKIPPED` in a row were not finite.
        """
        from tinker import AdamParams

        if getattr(loss_fn, "entropy", "none") == "gradient":
            raise UnsupportedByBackendError(
                "Tinker sends no entropy, whose gradient the loss wants; set "
                "algorithm.loss.entropy_coeff to 0"
            )
        start, config = time.perf_counter(), self._config
        wanted = set(range(len(batch.steps)) if indices is None else indices)
        rows = select(batch.rows, batch.steps, wanted)
        if not rows:
            raise BatchError("train_step was given no steps; name one at least")
        outputs: list[tuple[Tensor, LossOutput]] = []

        def loss_of(data: Any, log_probs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            values, tokens = _responses(batch, rows, log_probs, wanted)
            columns = {name: column[tokens] for name, column in batch.columns.items()}
            output = loss_fn(values, None, columns)
            outputs.append((tokens, output))
            if not torch.isfinite(output.loss):
                return sum((row * 0).sum() for row in log_probs), {}  # type: ignore[return-value]
            return output.loss, {}

        self._client.forward_backward_custom(_data(rows), loss_of).result()
        ((tokens, output),) = outputs
        for name, values in output.columns.items():
            column = batch.columns.setdefault(name, torch.full((batch.n_tokens,), torch.nan))
            column[tokens] = values.detach().cpu().float()
        loss, lr = float(output.loss.detach()), self._updates.lr
        reported: Mapping[str, float] = {}
        if is_applied := math.isfinite(loss):
            beta1, beta2 = config.betas
            step = AdamParams(
                learning_rate=lr,
                beta1=beta1,
                beta2=beta2,
                eps=config.eps,
                weight_decay=config.weight_decay,
                grad_clip_norm=config.max_grad_norm,
            )
            reported = self._client.optim_step(step).result().metrics or {}
            self._updates.apply()
        else:
            self._updates.skip(f"loss is {loss}")
        means: dict[str, Mean] = output.metrics
        return {
            **{name: float(m.total) / float(m.count) for name, m in means.items() if m.count > 0},
            **{name: float(value) for name, value in reported.items()},
            "loss": loss,
            "lr": lr,
            "tokens": float(len(tokens)),
            "rows": float(len(rows)),
            "skipped": float(not is_applied),
            "skipped_updates": float(self._updates.skipped),
            "seconds": time.perf_counter() - start,
        }

    # -- weights -----------------------------------------------------------------------------

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory of the whole model, adapters merged."""
        target = Path(path)
        fetched = target / "fetched"
        state = self._fetch(fetched)
        if (fetched / ADAPTERS).is_file():
            _merge(self._model_path, fetched, target)
        else:
            for file in fetched.iterdir():
                shutil.move(file, target / file.name)
        shutil.rmtree(fetched)
        for file in self._model_path.iterdir():
            is_weight = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            is_own = file.name in OWN_FILES or (target / file.name).exists()
            if file.is_file() and not is_weight and not is_own:
                shutil.copyfile(file, target / file.name)
        (target / STATE).write_text(json.dumps({"state": state}))

    def save_adapters(self, path: str | Path) -> None:
        """Write the adapters alone, as a directory that peft loads.

        Raises:
            UnsupportedByBackendError: the service gave whole weights.
        """
        state = self._fetch(Path(path))
        if not (Path(path) / ADAPTERS).is_file():
            raise UnsupportedByBackendError(
                "the service gave whole weights and no adapters; set engine.weight_transport to "
                "disk"
            )
        (Path(path) / STATE).write_text(json.dumps({"state": state}))

    def load_weights(self, path: str | Path) -> None:
        """See `TrainingBackend.load_weights`: of the checkpoint that was saved beside them."""
        file = Path(path) / STATE
        if not file.is_file():  # those of the start
            self._client = self._fresh()
            return
        state = json.loads(file.read_text())["state"]
        self._client = self._service.create_training_client_from_state(state).result()

    def _fetch(self, folder: Path) -> str:
        """Download the weights of now; returns the name of their checkpoint."""
        from tinker import RestClient

        name = uuid.uuid4().hex[:12]
        state: str = self._client.save_state(name).result().path
        exported = self._client.save_weights_external(name).result().path
        own = {} if self._options.base_url is None else {"base_url": self._options.base_url}
        urls = RestClient(**own).get_external_weights_urls(exported).result().urls
        for file, url in urls.items():
            to = folder / file
            if not to.resolve().is_relative_to(folder.resolve()):
                raise BackendConfigError(f"the service names {file!r}, outside of its checkpoint")
            to.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as source, to.open("wb") as out:
                shutil.copyfileobj(source, out)
        return state

    def state_dict(self) -> dict[str, Any]:
        """The name of a checkpoint at Tinker, and what is counted here."""
        return {
            "state": self._client.save_state(uuid.uuid4().hex[:12]).result().path,
            **self._updates.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TrainingBackend.load_state_dict`."""
        loaded = self._service.create_training_client_from_state_with_optimizer(state["state"])
        self._client = loaded.result()
        self._updates.load(state)

    def close(self) -> None:
        """End the session at Tinker."""
        service, self._service = self._service, None
        if service is not None:
            service.close("success").result()


def _refuse(config: TorchBackendConfig) -> None:
    for name, value, wanted in (
        ("optimizer", config.optimizer, "adamw"),
        ("lora", config.lora, None),
        ("ranks", config.ranks, 1),
    ):
        if value != wanted:
            raise BackendConfigError(
                f"backend.{name} is {value!r}, which is Tinker's own to choose; leave it out "
                "(the rank of the adapters is `rank` in backend.options)"
            )
    if config.reference_path is not None:
        raise BackendConfigError(
            f"backend.reference_path is {str(config.reference_path)!r}, and at Tinker the "
            "reference is the model without its adapters; leave it out"
        )


def _data(rows: Sequence[TokenRow], *, weights: bool = False) -> list[Any]:
    """Return the part of each row that is sent: its tokens, and each one's next."""
    from tinker import Datum, ModelInput, TensorData

    data = []
    for row in rows:
        ids = torch.as_tensor(row.ids.astype("int64"))
        inputs = {"target_tokens": TensorData.from_torch(ids[1:])}
        if weights:
            inputs["weights"] = TensorData.from_torch(torch.zeros(len(ids) - 1))
        sent = ModelInput.from_ints(ids[:-1].tolist())
        data.append(Datum(model_input=sent, loss_fn_inputs=inputs))
    return data


def _responses(
    batch: TinkerBatch,
    rows: Sequence[TokenRow],
    log_probs: Sequence[Tensor],
    wanted: set[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probs of response tokens, [n], and which tokens of the batch they are.

    Args:
        log_probs: of each row's tokens but the first.
    """
    values, tokens = [], []
    for row, own in zip(rows, log_probs, strict=True):
        for i in row.steps:
            if wanted is None or i in wanted:
                step = batch.steps[i]
                end = step.n_tokens - 1
                values.append(own[end - len(step.response_ids) : end])
                tokens.append(torch.arange(int(batch.offsets[i]), int(batch.offsets[i + 1])))
    return torch.cat(values), torch.cat(tokens)


def _merge(model_path: Path, adapters: Path, target: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    merged = PeftModel.from_pretrained(model, str(adapters)).merge_and_unload()
    merged.save_pretrained(target)
