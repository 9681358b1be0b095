"""Results of TRL's SFTTrainer on conversations, step by step; recorded in sft.json.

    python -m tests.trainer.golden.sft      records, where TRL is installed (`make test-trl`)

TRL is used as its documentation says for conversations: a data set with `messages` and `tools`,
`assistant_only_loss=True` and a chat template whose `{% generation %}` marks what the assistant
says (https://huggingface.co/docs/trl/sft_trainer, "Train on assistant messages only").
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from stepwell.quickstart.conversations import conversations

RECORDED = Path(__file__).with_suffix(".json")
MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"
STEPS, BATCH = 5, 4
LR, BETAS, MAX_GRAD_NORM = 1e-3, (0.9, 0.95), 1.0


def rows() -> list[dict[str, Any]]:
    """The conversations, in the order of training: each calls a tool and answers, in a sentence
    that the model has not learnt."""
    found = list(conversations(STEPS * BATCH))
    for row in found:
        last = row["messages"][-1]
        last["content"] = f"Together that is {last['content']}, as my calculator says."
    return found


def has_trl() -> bool:
    """True if TRL is installed."""
    return importlib.util.find_spec("trl") is not None


def marked(template: str) -> str:
    """The quickstart's chat template with TRL's marks around what the assistant writes, the end of
    its turn included."""
    begin, _, rest = template.partition(
        "{{- '<|im_start|>assistant\\n' + text(message.content) -}}"
    )
    said, _, end = rest.partition("{{- '<|im_end|>\\n' -}}")
    assert end, "the template is another one"
    return (
        f"{begin}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- generation -%}}"
        f"{{{{- text(message.content) -}}}}{said}{{{{- '<|im_end|>' -}}}}{{%- endgeneration -%}}"
        f"{{{{- '\\n' -}}}}{end}"
    )


def trl_steps() -> list[dict[str, float]]:
    """`loss` and `grad_norm` of each optimizer step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl: Any = importlib.import_module("trl")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = marked(tokenizer.chat_template)
    with tempfile.TemporaryDirectory(prefix="stepwell-trl-") as folder:
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows()),
            args=trl.SFTConfig(
                output_dir=folder,
                assistant_only_loss=True,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                train_sampling_strategy="sequential",
                learning_rate=LR,
                lr_scheduler_type="constant",
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                weight_decay=0.0,
                max_grad_norm=MAX_GRAD_NORM,
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: float(entry[key]) for key in ("loss", "grad_norm")} for entry in told]


def main() -> None:
    trl: Any = importlib.import_module("trl")
    RECORDED.write_text(json.dumps({"trl": trl.__version__, "steps": trl_steps()}, indent=2) + "\n")
    print(RECORDED.read_text())


if __name__ == "__main__":
    main()
