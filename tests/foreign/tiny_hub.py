"""Fills a local hub cache with tiny models of the names that a suite asks for.

Run by the environment that has transformers, `python tiny_hub.py HUB TINY FILE...` finds every
model name in the sources. For those whose name tells an architecture it saves a configuration,
random weights of a fixed seed and a tokenizer, as the hub's own cache lies on disk.
What has no architecture in its name stays away, and tests that need it are skipped for the hub.
In TINY it makes what transformers' tests of pipelines ask for (`TRANSFORMERS_TINY_MODEL_PATH`).
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto import modeling_auto

NAMES = re.compile(r"[\"']([\w.-]+/[\w.-]+)[\"']")
CLASS = re.compile(r"[A-Z]\w*?(?:For[A-Z]\w+|LMHeadModel|Model)(?![a-z])")
SPOKEN = {  # names that speak of a family, not of a class
    r"opt-\d+m": "OPTForCausalLM",
    r"\bgpt2\b": "GPT2LMHeadModel",
    r"\b(flan-)?t5(-base|-small)?$": "T5ForConditionalGeneration",
    r"mixtral-tiny|tiny-mixtral": "MixtralForCausalLM",
    r"bloomz?-": "BloomForCausalLM",
    r"qwen3-moe$": "Qwen3MoeForCausalLM",
    r"qwen2(-0\.5b)?$": "Qwen2ForCausalLM",
    r"tinyllama-|smol_llama": "LlamaForCausalLM",
}
LAYERS, WIDTH, HEADS, VOCABULARY = 2, 32, 4, 1024
_NAMES: tuple[tuple[int | None, str], ...] = (
    (VOCABULARY, "vocab_size"),
    (WIDTH, "hidden_size n_embd n_embed d_model word_embed_proj_dim embedding_size projection_dim"),
    (2 * WIDTH, "intermediate_size moe_intermediate_size intermediate_size_mlp ffn_dim n_inner"),
    (2 * WIDTH, "d_ff encoder_ffn_dim decoder_ffn_dim"),
    (LAYERS, "num_hidden_layers n_layer num_layers num_decoder_layers encoder_layers"),
    (LAYERS, "decoder_layers"),
    (HEADS, "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads"),
    (WIDTH // HEADS, "head_dim d_kv rotary_dim query_pre_attn_scalar"),
    (2, "num_key_value_heads num_experts_per_tok"),
    (512, "max_position_embeddings n_positions"),
    *((4, "num_local_experts num_experts"), (16, "sliding_window"), (32, "image_size")),
    *((8, "patch_size"), (0, "decoder_start_token_id"), (None, "forced_eos_token_id")),
)
SIZES: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}


FAMILIES = "llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2".split()
TASKS = ("", "_FOR_CAUSAL_LM", "_FOR_SEQUENCE_CLASSIFICATION", "_FOR_TOKEN_CLASSIFICATION")
TASKS += ("_FOR_QUESTION_ANSWERING",)


def main(hub: Path, tiny: Path, sources: list[Path]) -> None:
    """Makes what is not there yet; prints a line for each name."""
    names: set[str] = set()
    for path in sources:
        names |= set(NAMES.findall(path.read_text(encoding="utf-8")))
    for name in sorted(names):
        known = class_of(name)
        if known is not None:
            print(f"{name}: {save(hub, name, known) or known.__name__}", flush=True)
    fill_tiny(tiny)


def fill_tiny(tiny: Path) -> None:
    """Makes models of the families with every head, and the summary that lists them."""
    summary: dict[str, dict[str, list[str]]] = {}
    words = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
    for family, task in itertools.product(FAMILIES, TASKS):
        names = getattr(modeling_auto, f"MODEL{task}_MAPPING_NAMES").get(family)
        for name in names if isinstance(names, tuple) else [names] if names else []:
            summary[name] = {**words, "model_classes": [name]}
            known, place = getattr(transformers, name), tiny / family / name
            if not place.exists():
                torch.manual_seed(0)
                known(small(known.config_class())).eval().save_pretrained(place)
                tokenizer().save_pretrained(place)
    (tiny / "reports").mkdir(exist_ok=True, parents=True)
    (tiny / "reports" / "tiny_model_summary.json").write_text(json.dumps(summary))


def class_of(name: str) -> type | None:
    """The transformers class whose architecture a hub name tells, None if it tells none."""
    repository = name.partition("/")[2]
    if re.search(r"-lora\b|gptq|-awq|AQLM", repository):
        return None  # adapters and quantized weights: not of a model's own making
    found = CLASS.search(repository)
    spoken = [said for pattern, said in SPOKEN.items() if re.search(pattern, repository, re.I)]
    wanted = found.group() if found else spoken[0] if spoken else ""
    made = getattr(transformers, wanted, None)
    return made if isinstance(made, type) else None


def save(hub: Path, name: str, known: Any) -> str:
    """Saves one model as the hub's cache would hold it; returns what went wrong, "" for nothing."""
    place = hub / f"models--{name.replace('/', '--')}"
    revision = f"{zlib.crc32(name.encode()):040x}"
    if (place / "refs" / "main").exists():
        return ""
    snapshot = place / "snapshots" / revision
    try:
        torch.manual_seed(0)
        config = small(known.config_class())
        config.architectures = [known.__name__]
        known(config).eval().save_pretrained(snapshot)
        tokenizer().save_pretrained(snapshot)
    except Exception as error:
        return f"not made, {type(error).__name__}: {error}".partition("\n")[0]
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision)
    return ""


def small(config: Any) -> Any:
    """The same configuration with every size made tiny, inner configurations as well."""
    config.pad_token_id, config.bos_token_id, config.eos_token_id = range(3)
    types = getattr(config, "layer_types", None)
    for field, size in SIZES.items():
        if getattr(config, field, None) is not None and not isinstance(
            getattr(type(config), field, None), property
        ):
            setattr(config, config.attribute_map.get(field, field), size)
    if types:
        config.layer_types = (sorted(set(types)) * LAYERS)[:LAYERS]
    for inner in config.sub_configs:
        if getattr(config, inner, None) is not None:
            small(getattr(config, inner))
    return config


def tokenizer() -> Any:
    """A byte-level tokenizer without merges: every text has ids, all below the vocabulary."""
    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*special, *letters])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


if __name__ == "__main__":
    hub, tiny, *sources = map(Path, sys.argv[1:])
    main(hub, tiny, sources)
