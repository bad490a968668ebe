"""Write the tiny model as a Hugging Face folder: weights, configuration, model card."""

import dataclasses
import json
import pathlib
import platform
import textwrap
from typing import Any

from safetensors.torch import save_file

from bench.tiny.model import Shape, TinyLlama
from tests.fixture_model import Logits, corpus, second_copy_bits, validation_bits

WINDOWS = 128

CARD = """\
---
license: apache-2.0
pipeline_tag: text-generation
---
# FlowKV's tiny byte-level Llama

A really trained language model of {parameters:,} parameters, small enough to ship with a library.
It exists so that demonstrations and tests of a key/value cache measure a model that *uses* its
cache. It writes text that looks like Python, soon repeats itself, and is good for nothing else.

* **Architecture**: `LlamaForCausalLM`; the sizes are in `config.json`.
* **Tokens** are bytes: the id of a byte is its value, no tokenizer is needed. Zero separates files
  and pads.
* **Weights**: fp16, loaded with
  `AutoModelForCausalLM.from_pretrained(flowkv.data.tiny_path(), dtype=torch.float32)`.

## Data

The source of the Python {python} standard library (`*.py`, without tests, IDLE, encodings, lib2to3
and pydoc data), split by the SHA-256 of each file's path: {train_bytes:,} bytes for training,
{validation_bytes:,} for validation.

## Training

{training}

The repeating rows are the point. Trained without them, a model of this size predicts from the
last few dozen bytes, and the loss of a far page of its cache goes unnoticed. With them it grows
induction heads: given a text and then the same text again, it copies the second from the keys and
values of the first. It does so well up to some 500 bytes back and hardly from 1000 on. These heads
are in the last layer. A far page that is lost in another layer alone moves single logits (in layers
1 and 2 by a few hundredths at most) and leaves the figures below as they are.

`bench/tiny/train.py` reproduces the model. Rounding makes the weights differ on another processor
or torch version.

## Figures

Bits per byte in fp32 on validation text, {windows} windows a figure. `tests/fixture_model.py`
measures them, `tests/test_fixture_model.py` holds the model to them.

{figures}

## Licence

The weights are under Apache-2.0, like FlowKV. They were trained on the source of the Python
standard library, which is under the Python Software Foundation License; none of it is in this
folder.
"""


def export(folder: pathlib.Path, model: TinyLlama, shape: Shape, training: str) -> None:
    """Write `model` to `folder`, with the card's figures measured on the rounded weights."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.detach().half() for name, weight in model.state_dict().items()}
    weights = folder / "model.safetensors"
    save_file(rounded, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors lets nobody but the owner read it
    write_json(folder / "config.json", configuration(shape))
    write_json(folder / "generation_config.json", {"pad_token_id": 0})

    as_stored = TinyLlama(shape).eval()
    as_stored.load_state_dict({name: weight.float() for name, weight in rounded.items()})
    card = CARD.format(
        parameters=sum(weight.numel() for weight in rounded.values()),
        python=platform.python_version(),
        train_bytes=len(corpus("train")),
        validation_bytes=len(corpus("validation")),
        training=textwrap.fill(training, 99),
        windows=WINDOWS,
        figures=figures(as_stored),
    )
    (folder / "README.md").write_text(card)


def configuration(shape: Shape) -> dict[str, Any]:
    """Return `config.json`: what `transformers.LlamaConfig` reads."""
    sizes = dataclasses.asdict(shape)
    rope_theta = sizes.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": "float16",
    }


def figures(logits: Logits) -> str:
    """Return the card's tables: validation by length of context, copies by their distance."""
    lines = ["| validation text | bits/byte |", "|---|---|"]
    for length in (512, 2048, 4096):
        bits = validation_bits(logits, windows=WINDOWS, length=length)
        lines.append(f"| windows of {length} bytes | {bits:.3f} |")
    lines += ["", "| a text and its copy | first | second |", "|---|---|---|"]
    for period in (128, 256, 512, 1024, 2048):
        copy = second_copy_bits(logits, windows=WINDOWS, period=period)
        lines.append(f"| repeated after {period} bytes | {copy.first:.3f} | {copy.second:.3f} |")
    return "\n".join(lines)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, readable."""
    path.write_text(json.dumps(content, indent=2) + "\n")
