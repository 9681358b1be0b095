"""The model: loading, one forward over cache rows, replacing the weights.

Generic over dense decoder-only models of transformers: the model's own forward runs with a custom
`Cache`, a 4-D mask and explicit positions. Of a model that reads pictures (`backends/pictures.py`)
the decoder gets embeddings, the tower's at placeholders, and rotary positions of three rows; its
vision tokens are never sampled. Sliding-window and recurrent layers would need other
masks or states and are refused, and so is any model whose logits over the cache are not those of
its plain forward: a few tokens prove it when it is loaded. Not thread-safe: the scheduler's thread
owns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from stepwell.backends.engines.embedded.adapters import Adapters, WeightLoadError
from stepwell.backends.engines.embedded.cache import KVCache, WritePlan
from stepwell.backends.engines.embedded.vision import Vision
from stepwell.backends.model_folder import checkpoint_name, module_name
from stepwell.backends.model_loading import load_causal_lm
from stepwell.backends.pictures import PictureProcessor
from stepwell.backends.weights.delta import since
from stepwell.backends.weights.digest import model_hashes

DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelRunner:
    """A causal LM and its key/value cache."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        context_length: int | None = None,
        max_running: int = 64,
        n_retained: int = 64,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        config = AutoConfig.from_pretrained(model_path)
        decoder = config.get_text_config()
        self.context_length = _context_length(decoder, context_length)
        _refuse_unsupported_layers(decoder, self.context_length)
        self.pictures = PictureProcessor.of(model_path)
        """None: it reads text only."""
        model: Any = load_causal_lm(model_path, dtype=DTYPES[dtype])
        self._model = model.to(self.device).eval().requires_grad_(False)
        self.config: PretrainedConfig = self._model.config
        self.dtype: torch.dtype = self._model.dtype
        self.vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        self.eos_ids = _eos_ids(self._model)
        self.cache = KVCache(
            decoder.num_hidden_layers,
            max_running,
            n_retained,
            np.int32 if self.pictures is None else np.int64,
        )
        self.adapters = Adapters(self._model)
        self._offloaded = False
        self._columns = torch.arange(0, device=self.device)
        self._refuse_unless_exact()

    @torch.inference_mode()
    def _refuse_unless_exact(self) -> None:
        """Compare the last logits of a few tokens, in two pieces and in a row of their own, with
        those of the model's forward without a cache.

        Raises:
            ValueError: the forward fails with the cache, or they differ by more than the root of
                the dtype's precision, as a part of their range. Sums in another order differ by
                1e-7 of it in float32; a model that takes no cache (RWKV-4) by half of it.
        """
        n = min(6, self.context_length)
        first = n // 2
        ids = (self.vocab_size // 2 + np.arange(n)[None]) % self.vocab_size
        refusal = f"model_type {self.config.model_type!r} needs another engine: "
        remedy = "; use SGLang or vLLM (engine=sglang, engine=vllm)"
        try:
            row = np.zeros(1, dtype=np.int64)
            self.forward(row, ids[:, :first], row, row + first)
            pair = np.concatenate([np.where(np.arange(n) < first, 0, ids), ids])
            rows = np.arange(min(2, self.cache.n_rows))
            starts, lengths = np.array([first, 0]), np.array([n - first, n])
            pieces = self.forward(rows, pair[rows], starts[rows], lengths[rows])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:  # of the model's own code: it may want another mask or cache
            why = f"{type(e).__name__}: {' '.join(str(e).split()):.200}"
            raise ValueError(f"{refusal}its forward fails with the cache ({why}){remedy}") from e
        self.cache.drop()
        tokens = torch.from_numpy(ids).to(self.device)
        whole = self._model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        if self.pictures is not None:  # never sampled: minus infinity in the pieces
            hidden = list(self.pictures.forbidden_ids)
            whole[hidden] = pieces[:, hidden] = 0.0
        apart = float((pieces - whole).abs().max() / (whole.max() - whole.min()).clamp_min(1e-6))
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        if _is_finite(whole) and not apart <= tolerance:
            raise ValueError(
                f"{refusal}its logits in pieces differ from those of the whole by {apart:.1e} of "
                f"their range (at most {tolerance:.1e}){remedy}"
            )

    def forward(
        self,
        rows: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        visions: Sequence[Vision | None] = (),
    ) -> Tensor:
        """Run `lengths[b]` new tokens of row `rows[b]`, whose KV holds `starts[b]` positions and
        whose request has the pictures `visions[b]`; negative ids are theirs.

        `ids` [B, S] is aligned to the right, so that the last column is every row's last token.
        What pads it on the left writes to the row's next free position, where the next token
        overwrites it, and is attended by nobody.

        Returns float32 logits [B, vocab] of the last column.
        """
        batch, width = ids.shape
        ends = starts + lengths
        self.cache.ensure_capacity(int(ends.max()) + 1)
        offsets = np.arange(width)[None] - (width - lengths)[:, None]
        positions = np.where(offsets >= 0, starts[:, None] + offsets, ends[:, None])
        kv_len = int(ends.max()) + (1 if (lengths < width).any() else 0)
        adjacent = batch == 1 or bool((np.diff(rows) == 1).all())
        at = torch.from_numpy(positions).to(self.device)
        self.cache.plan = WritePlan(
            rows=torch.from_numpy(rows).to(self.device),
            positions=at,
            kv_len=kv_len,
            read=slice(int(rows[0]), int(rows[0]) + batch) if adjacent else None,
        )
        if len(self._columns) < kv_len:
            self._columns = torch.arange(self.cache.capacity + 1, device=self.device)
        hidden = self._columns[:kv_len] > at[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, float("-inf"))
        if self.pictures is None:
            inputs = {"input_ids": torch.from_numpy(ids).to(self.device), "position_ids": at}
        else:
            inputs = self._with_pictures(self.pictures, ids, positions, visions)
        out = self._model(
            **inputs,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache.plan = None
        self.cache.kv_len[rows] = ends
        logits: Tensor = out.logits[:, -1].float()
        if self.pictures is not None:
            logits[:, list(self.pictures.forbidden_ids)] = -torch.inf
        return logits

    def _with_pictures(
        self,
        processor: PictureProcessor,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        visions: Sequence[Vision | None],
    ) -> dict[str, Tensor]:
        """Inputs of the decoder: `inputs_embeds` [B, S, hidden] and `position_ids` [3, B, S]."""
        tokens = torch.from_numpy(np.where(ids < 0, processor.placeholder_id, ids)).to(self.device)
        embeds = self._model.get_input_embeddings()(tokens)
        rotary = np.repeat(positions[None], 3, axis=0)
        for b, vision in enumerate(visions):
            if vision is None:
                continue
            rotary[:, b] = vision.positions(positions[b])
            columns = np.flatnonzero(ids[b] < 0)
            if not len(columns):
                continue
            at = positions[b, columns]
            for i in vision.within(int(at[0]), int(at[-1]) + 1):
                own = vision.embeddings[i]
                if own is None:
                    own = vision.embeddings[i] = self._embed(processor, vision.png(i))
                picture = vision.pictures[i]
                mine = (at >= picture.at) & (at < picture.end)
                places = torch.from_numpy(at[mine] - picture.at).to(self.device)
                embeds[b, torch.from_numpy(columns[mine]).to(self.device)] = own[places]
        return {
            "inputs_embeds": embeds,
            "position_ids": torch.from_numpy(rotary).to(self.device),
        }

    def _embed(self, processor: PictureProcessor, png: bytes) -> Tensor:
        """The tower's embeddings of one picture, [n_tokens, hidden]."""
        features = processor.features([png])
        tower = self._model.base_model.visual
        pixels = torch.from_numpy(features["pixel_values"]).to(self.device, self.dtype)
        grid = torch.from_numpy(features["image_grid_thw"]).to(self.device)
        found: Tensor = tower(pixels, grid_thw=grid).pooler_output
        return found

    def load_weights(self, path: str) -> None:
        """Replace the weights from a Hugging Face directory, or those that changed
        (`weights/delta.py`); all or nothing.

        Raises:
            WeightLoadError: unreadable, or another architecture. The old weights are untouched.
        """
        try:
            new = self._read_checkpoint(path)
            is_partial = since(Path(path)) is not None
        except Exception as e:  # whatever the files hold
            raise WeightLoadError(f"Failed to load weights from {path!r}: {e}") from e
        self._replace(new, f"Failed to load weights from {path!r}: ", partial=is_partial)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some or all of the weights; all of those given or none.

        Raises:
            WeightLoadError: a name or shape that the model does not have, or a value not finite.
        """
        self._replace(tensors, "Failed to load tensors: ", partial=True)

    def offload(self) -> None:
        """Keep the weights in the host's memory and free the device's."""
        self._model.to("cpu")
        self._offloaded = True

    def reload(self) -> None:
        """Bring the weights back to the device."""
        self._model.to(self.device)
        self._offloaded = False

    def hashes(self) -> dict[str, str]:
        """Name -> hash of every weight, and of a loaded adapter's tensors as they came."""
        hashes = model_hashes(self._model)
        if self.pictures is not None:
            hashes = {checkpoint_name(name): value for name, value in hashes.items()}
        return {**hashes, **self.adapters.hashes}

    def _replace(self, new: Mapping[str, Tensor], refusal: str, *, partial: bool) -> None:
        if self._offloaded:
            raise WeightLoadError(f"{refusal}released; resume_memory_occupation comes first")
        own = self._model.state_dict()
        new = {module_name(name, own): tensor for name, tensor in new.items()}
        missing = [] if partial else sorted(self._required_names(own) - new.keys())
        unknown = sorted(new.keys() - own.keys())
        wrong = [
            f"{k} {tuple(new[k].shape)} instead of {tuple(own[k].shape)}"
            for k in sorted(own.keys() & new.keys())
            if own[k].shape != new[k].shape
        ]
        if missing or unknown or wrong:
            raise WeightLoadError(
                f"{refusal}not a checkpoint of this model; "
                f"missing {missing[:3]}, unknown {unknown[:3]}, wrong shape {wrong[:3]}"
            )
        broken = [k for k, v in new.items() if not _is_finite(v)]
        if broken:
            raise WeightLoadError(f"{refusal}not finite in {broken[:3]}")
        self.adapters.forget()  # its weights are replaced, or what it was added to is
        with torch.no_grad():
            for name, value in new.items():
                own[name].copy_(value)

    def _required_names(self, own: dict[str, Tensor]) -> set[str]:
        """State names that a checkpoint must hold: of tied tensors, one suffices."""
        seen: dict[int, str] = {}
        tied_names = set(getattr(self._model, "_tied_weights_keys", None) or ())
        for name in sorted(own, key=lambda n: (n in tied_names, n)):
            seen.setdefault(own[name].data_ptr(), name)
        return set(seen.values())

    def _read_checkpoint(self, path: str) -> dict[str, Tensor]:
        """The checkpoint's tensors under this model's state names."""
        folder = Path(path)
        if not folder.is_dir():
            raise OSError("no such directory")
        self._check_config(folder)
        tensors: dict[str, Tensor] = {}
        for file in _safetensors_files(folder):
            tensors.update(load_file(file))
        own = self._model.state_dict()
        if tensors and {module_name(name, own) for name in tensors} <= own.keys():
            return tensors
        # Other file formats and renamed tensors: transformers knows how to convert them.
        model, info = load_causal_lm(path, dtype=self.dtype, output_loading_info=True)
        lost = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
        if lost:
            raise ValueError(f"missing or mismatched: {lost[:3]}")
        converted: dict[str, Tensor] = model.state_dict()
        return converted

    def _check_config(self, folder: Path) -> None:
        file = folder / "config.json"
        if not file.is_file():
            raise OSError("it has no config.json")
        theirs = json.loads(file.read_text()).get("model_type")
        if theirs != self.config.model_type:
            raise ValueError(
                f"model_type is {theirs!r}, this engine runs {self.config.model_type!r}"
            )


def _is_finite(tensor: Tensor) -> bool:
    """True if no value is infinite or NaN, which both ends of the range show: the pause of a
    publication waits for this, and `isfinite` of every value takes fifty times as long."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _safetensors_files(folder: Path) -> Sequence[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def _context_length(config: PretrainedConfig, wanted: int | None) -> int:
    derived = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        if not derived:
            raise ValueError(
                "the model's config has no max_position_embeddings; set context_length"
            )
        return derived
    if derived and wanted > derived:
        raise ValueError(
            f"context_length is {wanted}, but the model was made for {derived} positions "
            "(max_position_embeddings); lower it"
        )
    return wanted


def _refuse_unsupported_layers(config: PretrainedConfig, context_length: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"model_type {config.model_type!r} has {sorted(odd)} layers; the embedded engine runs "
            "dense attention only, use SGLang"
        )
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or (
        window is not None and not hasattr(config, "layer_types")
    )
    if windowed and window is not None and window < context_length:
        raise ValueError(
            f"the model's sliding_window is {window} and context_length {context_length}; the "
            f"embedded engine has no sliding window: set context_length to at most {window}"
        )


def _eos_ids(model: Any) -> frozenset[int]:
    """End-of-sequence ids of the model config and its generation config, as SGLang unites them."""
    ids: set[int] = set()
    for config in (model.config.get_text_config(), model.generation_config):
        value = getattr(config, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    return frozenset(ids)
