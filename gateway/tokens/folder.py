"""This module reads a tokenizer from a model's folder as transformers does, so that a gateway needs
no transformers.

    tokenizer.json                        the tokenizer itself
    tokenizer_config.json                 added tokens, special tokens by name, chat template
    special_tokens_map.json               special tokens by name, where folders are older
    chat_template.jinja, additional_chat_templates/NAME.jinja
    config.json                           ids of the model, which may have more than its tokenizer

Every kind of tokenizer with a tokenizer.json is read. Others (slow ones, SentencePiece, tiktoken,
code of the model's own) get one from transformers first; the error says how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stepwell.gateway.errors import GatewayConfigError


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """Content of a tokenizer's folder."""

    backend: Tokenizer
    template: str | Mapping[str, str]
    """The chat template, or several by name."""
    special_tokens: Mapping[str, str]
    """Text by name (`eos_token`, …)."""
    vocabulary: int
    """Ids of the model; 0: no model is there."""


def read_folder(path: str | None) -> TokenizerFolder:
    """
    Args:
        path: a folder, or the name of a model in Hugging Face's cache on this machine.

    Raises:
        GatewayConfigError
    """
    if path is None:
        raise GatewayConfigError(
            "gateway.tokenizer_path is null; give the folder of the served model's tokenizer"
        )
    try:
        folder = model_folder(path)
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers and huggingface_hub raise nothing narrower
        raise GatewayConfigError(
            f"gateway.tokenizer_path is {path!r}, from which no tokenizer.json can be read "
            f"({e!s:.200}); give the folder of the served model's tokenizer. Of one without "
            "a tokenizer.json, write it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from e
    config = _read_json(folder / "tokenizer_config.json")
    added = config.get("added_tokens_decoder")
    if added is None:
        config |= _read_json(folder / "special_tokens_map.json")
    else:
        backend.add_tokens([AddedToken(**added[i]) for i in sorted(added, key=int)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    special_tokens = {k: _text(v) for k, v in config.items() if k.endswith("_token") and _text(v)}
    if isinstance(extra, dict):
        special_tokens |= {name: _text(token) for name, token in extra.items()}
        extra = ()
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    texts = dict.fromkeys((*special_tokens.values(), *map(_text, extra)))
    backend.add_special_tokens(
        [known.get(text) or AddedToken(text, special=True, normalized=False) for text in texts]
    )
    model = _read_json(folder / "config.json")
    sizes = [c.get("vocab_size") for c in (model, model.get("text_config") or {})]
    return TokenizerFolder(
        backend=backend,
        template=_template(folder, config),
        special_tokens=special_tokens,
        vocabulary=next((n for n in sizes if isinstance(n, int)), 0),
    )


def model_folder(path: str) -> Path:
    """The folder at `path`, or of a model of this name in Hugging Face's cache on this machine."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def _template(folder: Path, config: Mapping[str, Any]) -> str | Mapping[str, str]:
    named = {p.stem: p.read_text() for p in folder.glob("additional_chat_templates/*.jinja")}
    if (alone := folder / "chat_template.jinja").is_file():
        named["default"] = alone.read_text()
    found = named or config.get("chat_template")
    if not found:
        raise GatewayConfigError(
            "gateway.tokenizer_path holds a tokenizer without a chat template; add a "
            "chat_template.jinja to the folder"
        )
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    template: str | Mapping[str, str] = found
    return template


def _text(token: Any) -> str:
    """Text of a special token, which is a text or an object; empty for what is neither."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise GatewayConfigError(f"{file} cannot be read ({e}); restore it") from e
    return value
