"""`python -m tests.hooks.matrix`: every generating architecture of transformers, tiny and random.

Builds each architecture of the installed transformers whose configuration can be made small, asks
for two turns of a chat (of text, with an image, behind audio) without FlowKV and with it, and
prints where the tokens were the same, and what attention read: pages, dense tensors, or the model's
own cache and why. Half an hour on two cores.

    python -m tests.hooks.matrix                       # a table
    python -m tests.hooks.matrix causal image --json FILE
    python -m tests.hooks.matrix --only llama,whisper
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.generation.utils import GenerationMixin
from transformers.models.auto import modeling_auto as auto

from tests.hooks import models
from tests.hooks.compare import attached, foreign, reused

LAYERS, PATIENCE_S, SPECIAL = 4, 240.0, 240
KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "audio": dict(auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
}
"""Classes of models by the name of their configuration, for each kind of prompt."""

SIZES: dict[int, str] = {
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups",
    2: """num_key_value_heads num_query_groups num_experts_per_tok moe_topk moe_k
        linear_num_key_heads num_experts_per_token encoder_num_key_value_heads
        decoder_num_key_value_heads""",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_local_experts num_experts n_routed_experts moe_num_experts linear_num_value_heads
        mamba_num_heads mamba_n_heads conv_kernel depth num_decoder_layers num_encoder_layers
        encoder_num_hidden_layers decoder_num_hidden_layers encoder_num_attention_heads
        decoder_num_attention_heads attention_heads mm_tokens_per_image""",
    14: "patch_size",
    56: "image_size",
    8: "mamba_dt_rank time_step_rank index_topk",
    16: """head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank
        mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim
        mamba_head_dim index_head_dim index_n_heads query_pre_attn_scalar
        hidden_size_per_layer_input dim_head d_kv""",
    24: "sliding_window attention_window attention_window_size local_attention_size window_size",
    32: "q_lora_rank moe_intermediate_size shared_expert_intermediate_size mamba_d_head",
    64: """hidden_size n_embd d_model word_embed_proj_dim lru_width out_hidden_size embed_dim
        projection_dim text_hidden_size output_dim attention_dim""",
    128: """intermediate_size n_inner ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim mamba_d_ssm
        mlp_dim""",
    256: "vocab_size vocab_size_per_layer_input",
    1024: "max_position_embeddings n_positions max_target_positions",
}
FIELDS = {field: value for value, names in SIZES.items() for field in names.split()}
EXTRA = dict(attn_layer_period=2, attn_layer_offset=1, attn_layer_indices=[1, 3])
"""Fields that place the layers with attention among recurrent ones."""
MEDIA = "pixel_values", "input_features", "input_values"
MARK = re.compile("(image|video|audio|vision|boi|eoi|im|img).*_(id|index)")
LISTED = "layer_types layers_block_type mlp_layer_types no_rope_layers block_types"


@dataclass
class Outcome:
    """What became of one architecture.

    Args:
        kind: Of `KINDS`.
        name: Type of its configuration.
        way: What attention read: "pages", "dense", "pages and dense", or "native".
        why: Reason of a native cache, or of a model that could not be built; "" otherwise.
        reused: Tokens that were not computed.
        media: Whether an image or audio was in the prompt.
        same: Whether all tokens were those of the model alone; None where it was not built.
    """

    kind: str
    name: str
    way: str = ""
    why: str = ""
    reused: int = 0
    media: bool = False
    same: bool | None = None


def shrink(config: Any, *, mixed: bool, filled: bool = False) -> Any:
    """Return a small configuration of the same class, its parts shrunk alike.

    Args:
        config: With the sizes of a released model.
        mixed: Whether prompts hold more than text, whose positions may have three axes.
        filled: Whether sizes that the class leaves open are set.
    """
    known, fields = config.to_dict(), dict[str, Any]()
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if inner is not None and not isinstance(inner, dict):
            fields[part] = shrink(inner, mixed=mixed, filled=filled)
    for field in FIELDS.keys() & known.keys() - fields.keys():
        size = known[field]
        number = isinstance(size, (int, float, str)) and not isinstance(size, bool)
        if number or (filled and size is None):
            fields[field] = FIELDS[field]
    fields |= {k: v for k, v in EXTRA.items() if k in known}
    if "kv_lora_rank" in known:
        fields["num_key_value_heads"] = LAYERS
    for field in LISTED.split():
        listed = known.get(field)
        if isinstance(listed, list) and len(listed) > LAYERS:
            kinds = list(dict.fromkeys(map(str, listed)))
            fields[field] = [
                next(x for x in listed if str(x) == kinds[i % len(kinds)]) for i in range(LAYERS)
            ]
    rope = known.get("rope_parameters")
    if mixed and isinstance(rope, dict) and "rope_type" in rope:
        half = int(fields.get("head_dim", 16) * rope.get("partial_rotary_factor", 1.0)) // 2
        parts = [half - half // 3 * 2, half // 3, half // 3]
        fields["rope_parameters"] = rope | {"mrope_section": parts}
    marks = [k for k, v in known.items() if MARK.fullmatch(k) and isinstance(v, int) and v > 5]
    fields |= {field: 255 - place for place, field in enumerate(sorted(marks))}
    if not fields.keys() & set(getattr(config, "sub_configs", {})):
        for field, value in dict(pad_token_id=0, bos_token_id=1, eos_token_id=None).items():
            if field in known:
                fields[field] = value
    return type(config)(**fields)


def build(kind: str, name: str, *, filled: bool = False) -> Any:
    """Return a model of this type with a few thousand parameters a layer.

    Args:
        kind: Of `KINDS`.
        name: Type of its configuration.
        filled: See `shrink`.

    Raises:
        ValueError: Its configuration has sizes that are not known here.
    """
    found = KINDS[kind][name]
    cls = getattr(transformers, found if isinstance(found, str) else found[0])
    whole = CONFIG_MAPPING[name]()
    text = kind == "causal" and cls.config_class is not type(whole)
    whole = whole.get_text_config(decoder=True) if text else whole
    config = shrink(whole, mixed=kind == "image", filled=filled)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > 2e7:
        raise ValueError(f"{size:,} parameters are left")
    torch.manual_seed(0)
    model = models.sharpen(cls(config))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def tokens(length: int, seed: int = 1) -> torch.Tensor:
    """Return random token ids `[1, length]`, none of them special."""
    return models.prompt(length, seed).clamp_max(SPECIAL - 1)


def ask(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the sequences `[B, S]` of greedy search, by the loop that all models share."""
    # No answer may pad or begin an image: the second turn would be another kind of prompt.
    special = [0, 1, *range(SPECIAL, 256)]
    options = dict(max_new_tokens=20, return_dict_in_generate=True, suppress_tokens=special)
    return GenerationMixin.generate(model, **inputs, **options, do_sample=False).sequences


def media(kind: str, model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs of an image or of audio that the model might take, and the tokens they fill."""
    seeded = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=seeded)

    config = model.config
    if kind == "audio":
        for rows, columns in (
            (80, 3000),
            (80, 400),
            (128, 3000),
            (400, 80),
            (400, 128),
            (400, 160),
        ):
            yield {"input_features": noise(1, rows, columns)}
        yield {"input_values": noise(1, 16000)}
    elif kind == "image":
        vision = getattr(config, "vision_config", config)
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        side = getattr(vision, "image_size", 56)
        side = side[0] if isinstance(side, (list, tuple)) else side
        patch = getattr(vision, "patch_size", 14)
        patch = patch[0] if isinstance(patch, (list, tuple)) else patch
        depth = 3 * getattr(vision, "temporal_patch_size", 1) * patch * patch
        grid, sizes = torch.tensor([[1, 4, 4]]), torch.tensor([[side, side]])
        tries = [
            {"pixel_values": noise(16, depth), "image_grid_thw": grid},
            {"pixel_values": noise(1, 3, side, side)},
            {"pixel_values": noise(1, 3, side, side), "image_sizes": sizes},
            {"pixel_values": noise(1, 1, 3, side, side)},
            {
                "pixel_values": noise(1, 2, 3, side, side),
                "image_sizes": sizes,
            },
        ]
        owner = model if hasattr(model, "get_image_features") else getattr(model, "model", None)
        features = getattr(owner, "get_image_features", None)
        for one in tries if features is not None and token is not None else ():
            taken = inspect.signature(features).parameters
            if not one.keys() <= taken.keys():
                continue
            try:
                with torch.no_grad():
                    found = features(**one)
            except Exception:
                continue
            found = getattr(found, "pooler_output", found)
            parts = found if isinstance(found, (list, tuple)) else [found]
            count = sum(part.numel() // part.shape[-1] for part in parts)
            yield one | {"tokens": torch.full((1, count), token)}


def turns(kind: str, model: Any) -> Iterator[dict[str, Any]]:
    """Yield the inputs of two turns of a chat; the second one goes on from the first answer."""
    text = tokens(70)
    found = [{}] if kind in ("causal", "seq2seq") else [*media(kind, model), {}]
    name = "decoder_input_ids" if kind in ("seq2seq", "audio") else "input_ids"
    base = {"input_ids": tokens(40, seed=9)} if kind == "seq2seq" else {}
    for extra in found:
        filled = extra.pop("tokens", text[:, :0])
        prompt = torch.cat([text[:, :20], filled, text[:, 20:]], 1)
        inputs = base | extra | {name: prompt}
        try:
            answer = ask(model, inputs)
            break
        except Exception as error:
            last = error
    else:
        raise last
    yield inputs
    yield inputs | {name: torch.cat([answer, tokens(15, seed=2)], 1)}


def alone(kind: str, name: str) -> tuple[Any, list[dict[str, Any]], list[torch.Tensor]]:
    """Return a model, the inputs of two turns, and its own answers to them.

    Raises:
        Exception: Neither sizes that its class leaves open nor set ones give a model that runs.
    """

    def run(*, filled: bool) -> tuple[Any, list[dict[str, Any]], list[torch.Tensor]]:
        model = build(kind, name, filled=filled)
        inputs = [*turns(kind, model)]
        return model, inputs, [ask(model, one) for one in inputs]

    try:
        return run(filled=False)
    except Exception as error:
        try:
            return run(filled=True)
        except Exception:
            raise error from None


def judge(kind: str, name: str) -> Outcome:
    """Serve one architecture without FlowKV and with it."""
    from tests.inside import door_of

    outcome = Outcome(kind, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model, inputs, theirs = alone(kind, name)
        except Exception as error:  # it needs a configuration of its own, or cannot run alone
            outcome.why = f"not built: {type(error).__name__}: {str(error).strip()[:100]}"
            return outcome
        outcome.media = any(
            "pixel" in key or "features" in key or "values" in key for key in inputs[0]
        )
        said.clear()
        with attached(model) as kv:
            ours = [ask(model, one) for one in inputs for _ in range(2)]
            pairs = zip(ours, [one for one in theirs for _ in range(2)], strict=True)
            outcome.same = all(torch.equal(a, b) for a, b in pairs)
            outcome.reused = reused(kv)
            door = door_of(model)
            placed = {} if door is None else door.plan.placed
            ways = {"pages" if p.was_read and p.in_pages else "dense" for p in placed.values()}
            outcome.way = " and ".join(sorted(ways, reverse=True)) if outcome.reused else "native"
            outcome.why = foreign(kv)
        notes = [str(w.message) for w in said if "FlowKV" in str(w.message)]
        if notes and not outcome.why:
            outcome.why = notes[0][:300]
    return outcome


def work() -> None:
    """Judge the architectures named on standard input, an answer a line."""
    for line in sys.stdin:
        print(json.dumps(asdict(judge(*line.split()))), flush=True)


def walk(cases: list[tuple[str, str]]) -> Iterator[Outcome]:
    """Judge architectures in a process of their own, which is replaced when one hangs or dies."""
    child: Any = None
    for kind, name in cases:
        if child is None or child.poll() is not None:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.hooks.matrix", "--work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        clock = threading.Timer(PATIENCE_S, child.kill)
        clock.start()
        child.stdin.write(f"{kind} {name}\n")
        child.stdin.flush()
        line = child.stdout.readline()
        clock.cancel()
        if line:
            yield Outcome(**json.loads(line))
        else:
            child.kill()
            yield Outcome(kind, name, why=f"no answer within {PATIENCE_S:.0f} s, or a crash")
    if child is not None:
        child.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work()
    only = set(filter(None, given.only.split(",")))
    cases = [(k, n) for k in given.kinds for n in sorted(KINDS[k]) if not only or n in only]
    found = []
    for outcome in walk(cases):
        found.append(outcome)
        print(*asdict(outcome).values(), sep="\t", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
