"""The critic of GAE: a value model on the policy's backbone architecture, with its own optimizer.

    batch ──values──► V [T] ──► trainer/algorithms/ ──► returns [T] (columns values, returns)
                                                              │
              V ◄── optimizer step ◄── value loss, clipped ◄──┘ update, once per mini-batch

V_t is the value of the state before response token t, so it is read where log π(t) is: at the
position before the token. Rows, micro-batches, precision, sharding and the handling of updates
that are not finite are the torch backend's (`torch/backend.py`): to it a value is one more score
of a response token.

Owns: the value head, the value loss, the warm-up. Does not own: returns and advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from stepwell.backends.base import LossOutput, Mean, TokenBatch
from stepwell.backends.config import CriticConfig, TorchBackendConfig, ValueAggregation
from stepwell.backends.errors import BatchError
from stepwell.backends.rows import TokenRow
from stepwell.backends.torch.backend import TorchBackend, TorchBatch
from stepwell.backends.torch.context import Context
from stepwell.backends.torch.model import pictures_of, prepare
from stepwell.backends.torch.tree import is_enabled
from stepwell.backends.torch.vision import Tower


class Critic:
    """Values of states, and the model that learns them. Not thread-safe: one caller at a time.

    With `backend.ranks` it is sharded as the policy is, over as many Ray actors of its own.

    Args:
        backend: how it computes; the policy's section.
        model_path: the policy's model, the backbone to start from unless `config.path` is set.
        options: of `ranks.start`, e.g. the places of its actors.

    Raises:
        BackendConfigError: no model there, or no such device.
    """

    def __init__(
        self,
        config: CriticConfig,
        backend: TorchBackendConfig,
        model_path: str | Path,
        **options: Any,
    ) -> None:
        self._config = config
        own, path = config.model_config_of(backend), Path(config.path or model_path)
        self._model = ValueModel.build(own, path, **options)
        self._converted: tuple[TokenBatch, TokenBatch] | None = None
        self._updates = 0

    @property
    def warm(self) -> bool:
        """The policy may be trained on what was last trained here: the warm-up is over."""
        return self._updates > self._config.warmup_updates

    def values(self, batch: TokenBatch) -> Tensor:
        """V before each response token: [T] fp32 on the CPU, no grad."""
        return self._model.compute_log_probs(self._own(batch))

    def update(self, batch: TokenBatch, indices: Sequence[int] | None = None) -> dict[str, float]:
        """One optimizer step on the steps `indices` (all if None); columns `values` (as they were
        when the returns were computed) and `returns` (NaN: not trained) must be there.

        Returns:
            `critic/…`: `loss`, `grad_norm`, `lr`, `clip_frac`, `value_mean`, `return_mean`,
            `seconds`, `skipped_updates`, and `explained_variance` of the old values
            (left out where returns do not vary).

        Raises:
            BatchError: a column is missing, or none of the steps has a return.
            NonFiniteUpdateError: see `TorchBackend.train_step`.
        """
        if missing := {"values", "returns"} - batch.columns.keys():
            raise BatchError(
                f"the batch has no column {', '.join(sorted(missing))}; write it first"
            )
        steps = range(len(batch.steps)) if indices is None else indices
        chosen = torch.zeros(len(batch.steps), dtype=torch.bool)
        chosen[list(steps)] = True
        trained = chosen.repeat_interleave(batch.lengths) & batch.columns["returns"].isfinite()
        if not trained.any():
            raise BatchError("none of the steps has a return; the critic has nothing to learn")
        batch.columns["value_coef"] = shares(batch, trained, self._config.loss_agg_mode)
        loss_fn = ValueLoss(self._config.cliprange_value)
        update = self._model.train_step(self._own(batch), loss_fn, indices)
        self._updates += 1
        kept = ("loss", "grad_norm", "lr", "seconds", "skipped_updates")
        metrics = {f"critic/{name}": update[name] for name in kept}
        metrics |= {name: x for name, x in update.items() if name.startswith("critic/")}
        old, returns = (batch.columns[name][trained] for name in ("values", "returns"))
        if (explained := explained_variance(old, returns)) is not None:
            metrics["critic/explained_variance"] = explained
        return metrics

    @property
    def saves_beside(self) -> bool:
        """See `TrainingBackend.saves_beside`."""
        return self._model.saves_beside

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Begin to write weights and optimizer into `folder`; as `TrainingBackend.save_state`."""
        return {"model": self._model.save_state(folder), "updates": self._updates}

    def wait_saved(self) -> None:
        """See `TrainingBackend.wait_saved`."""
        self._model.wait_saved()

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on from what `save_state` wrote and returned."""
        self._model.load_state(folder, state["model"])
        self._updates = state["updates"]

    def free_cache(self) -> None:
        """See `TrainingBackend.free_cache`."""
        self._model.free_cache()

    def close(self) -> None:
        self._model.close()

    def _own(self, batch: TokenBatch) -> TokenBatch:
        """`batch` as the value model has it: rows of its own, unless the policy's will do."""
        if isinstance(batch, TorchBatch) and isinstance(self._model, ValueModel):
            return batch
        if self._converted is None or self._converted[0] is not batch:
            pictures = pictures_of(batch)
            pngs = {} if pictures is None else pictures.pngs
            own = self._model.convert_with_pictures(list(batch.steps), pngs)
            self._converted = batch, own
        own = self._converted[1]
        own.columns = batch.columns
        return own


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(G - V) / Var(G), [n] each: 1 perfect, 0 no better than a constant. None if G does
    not vary."""
    variance = returns.double().var(correction=0)
    if not variance > 0:
        return None
    return float(1 - (returns.double() - values.double()).var(correction=0) / variance)


def shares(batch: TokenBatch, trained: Tensor, mode: ValueAggregation) -> Tensor:
    """The share of every response token in the mean over an update, [T]; they sum to 1.

    Args:
        trained: [T] bool; other tokens have none.
    """
    if mode == "token-mean":
        return trained / trained.sum()
    numbers = dict[int | str, int]()
    names = [
        i if mode == "sequence-mean-token-mean" else s.trajectory_uid
        for i, s in enumerate(batch.steps)
    ]
    step = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    sample = step.repeat_interleave(batch.lengths)
    tokens = sample.bincount(weights=trained.double())
    return trained / (tokens[sample].clamp(min=1) * (tokens > 0).sum()).float()


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """½ Σ coef · max((V - G)², (clip(V, V_old ± c) - G)²) over the tokens with a return G; coef is
    the column `value_coef`, as `shares` makes it for a whole update.

    A `LossFn` whose `log_probs` are values. Source: PPO's reference implementation
    (openai/baselines ppo2); c is `cliprange_value`.
    """

    clip: float | None

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        live = columns["returns"].isfinite()
        v, old, returns = log_probs[live], columns["values"][live], columns["returns"][live]
        coef = columns["value_coef"][live]
        error = (v - returns).square()
        clipped = torch.zeros_like(error)
        if self.clip is not None:
            bounded = (torch.clamp(v, old - self.clip, old + self.clip) - returns).square()
            clipped = bounded > error
            error = torch.maximum(error, bounded)
        count = live.sum().double()
        metrics = {"clip_frac": clipped, "value_mean": v.detach(), "return_mean": returns}
        return LossOutput(
            0.5 * (coef * error).sum(),
            {f"critic/{name}": Mean(x.double().sum(), count) for name, x in metrics.items()},
        )


class ValueModel(TorchBackend):
    """A `TorchBackend` whose score of a response token is the value of the state before it, from a
    linear head in place of the LM head; it starts at 0, so V = 0 everywhere."""

    def _on_device(self, model: Any) -> Any:
        tower = self._tower_of(model)
        share, context = self._config.rows == "tree", self._ranks.context
        values = _Values(model, self._device, tower, share, context)
        self._place(values, tower)
        return values

    def save_weights(self, path: str | Path) -> None:
        """Refused: no engine serves values."""
        raise self._unsupported("save_weights")


class _Values(nn.Module):
    """The decoder and the value head as one module: the root that FSDP2 shards."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        tower: Tower | None,
        share: bool,
        context: Context | None,
    ) -> None:
        super().__init__()
        self._tower = tower
        self._share = share
        self._context = context
        width = model.get_output_embeddings().in_features
        head = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(head.weight)
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(head)  # in the model, so that it is trained and saved with it
        self.model = model
        self._device = device

    def forward(
        self, batch: TokenBatch, rows: Sequence[TokenRow], *, entropy: bool
    ) -> tuple[Tensor, None, Tensor]:
        """(V, None, token index): [n] each, of the response tokens in `rows`."""
        tower, as_tree = self._tower, is_enabled(self.model)
        processor = None if tower is None else tower.processor
        inputs = prepare(
            batch,
            rows,
            self._device,
            as_tree=as_tree,
            share=self._share,
            processor=processor,
            context=self._context,
        )
        # Not the model's own forward: what a family does to its logits must not touch values.
        kwargs = inputs.model_kwargs(tower, pictures_of(batch))
        hidden = self.model.base_model(**kwargs).last_hidden_state
        picked = hidden.flatten(0, 1).index_select(0, inputs.positions)
        # In float32: three digits of a value are too few to learn from its differences.
        head = self.model.get_output_embeddings().weight.float()
        values = linear(picked.float(), head).squeeze(-1)
        (values,) = inputs.whole([values])
        return values, None, inputs.tokens
