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
from contextlib import redirect_stdout
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
HEARD = """audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize
    musicflamingo nemo_speechlm omniasr qwen2_audio qwen3_asr vibevoice_asr voxtral
    voxtral_realtime""".split()
"""Decoders behind audio that transformers lists as models of an encoded text."""
KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": {
        name: cls
        for name, cls in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items()
        if name not in HEARD
    },
    "image": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "audio": dict(auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
    | {
        name: cls
        for name, cls in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items()
        if name in HEARD
    },
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
ROPE = dict(rope_type="default", rope_theta=10000.0)
MIXED = dict(layer_types=["sliding_attention", "full_attention"] * 2)
HYBRID = ["linear_attention", "full_attention"] * 2
INDEXED = ["linear_attention", "indexed_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(num_expert_group=1, layer_types=HYBRID),
    "blt": dict(encoder_hash_byte_group_vocab=64, num_hidden_layers=LAYERS),
    "blt_local_encoder": dict(hidden_size_global=64),
    "blt_local_decoder": dict(hidden_size_global=64),
    "cohere_compass_text": MIXED
    | dict(rope_parameters={kind: ROPE for kind in MIXED["layer_types"]}),
    "DbrxAttentionConfig": dict(rope_theta=10000.0, clip_qkv=8.0),
    "DbrxFFNConfig": dict(ffn_hidden_size=128),
    "dory": MIXED | dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "dots3_note_text": dict(
        layer_types=["indexed_attention", "sliding_attention"] * 2,
        head_dim=32,
        shared_experts_intermediate_size=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=32,
        swa_kv_lora_rank=16,
        swa_head_dim=32,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=16,
    ),
    "gemma3n_text": MIXED
    | dict(
        intermediate_size=[128] * LAYERS,
        activation_sparsity_pattern=[0.0] * LAYERS,
        num_kv_shared_layers=2,
    ),
    "FunAsrNanoAdaptorConfig": dict(intermediate_size=16, projector_hidden_size=64),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=HYBRID),
    "granite_speech": dict(window_size=15),
    "granite_speech_plus": dict(window_size=15),
    "blip_2_qformer": dict(encoder_hidden_size=64),
    "granite_speech_encoder": dict(hidden_dim=64),
    "granite_speech_plus_encoder": dict(hidden_dim=64),
    "mimi": dict(upsample_groups=64, num_filters=8),
    "moonshine": dict(encoder_num_key_value_heads=LAYERS, decoder_num_key_value_heads=LAYERS),
    "moonshine_streaming": dict(num_key_value_heads=LAYERS),
    "Nemotron3DiarizationHeadConfig": dict(audio_hidden_size=64),
    "seamless_m4t": dict(speech_encoder_intermediate_size=128),
    "seamless_m4t_v2": dict(speech_encoder_intermediate_size=128),
    "vibevoice_acoustic_tokenizer_encoder": dict(num_filters=1, depths=(1,) * 7, vae_std=0.0),
    "vibevoice_acoustic_tokenizer": dict(num_filters=1, depths=(1,) * 7),
    "inkling2_text": dict(unpadded_vocab_size=256),
    "inkling2_loop_text": dict(
        unpadded_vocab_size=256,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        n_layers_per_attn_res_block=1,
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "longcat_flash": dict(ffn_hidden_size=128, expert_ffn_hidden_size=32, zero_expert_num=2),
    "mamba2": dict(num_heads=8),
    "musicgen_decoder": dict(num_codebooks=1),
    "musicgen_melody_decoder": dict(num_codebooks=1),
    "phi4_multimodal": dict(pad_token_id=0, bos_token_id=1, eos_token_id=None),
    "qwen4_exp_text": dict(
        layer_types=INDEXED,
        hc_lowrank=16,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh"] * 2, hash_seed=0),
    "apertus1p5_vision_tokenizer": dict(
        codebook_size=16, base_channels=32, embed_dim=16, latent_channels=16
    ),
    "wavtokenizer_encoder": dict(
        codebook_dim=64,
        codebook_size=16,
        decoder_hidden_size=64,
        decoder_intermediate_size=64,
        decoder_num_layers=2,
    ),
    "apertus1p5": dict(image_token_offset=200, audio_token_offset=216),
    "blip-2": dict(image_token_index=250),
    "instructblip": dict(image_token_index=250),
    "instructblipvideo": dict(video_token_index=250),
    "instructblip_qformer": dict(encoder_hidden_size=64),
    "instructblipvideo_qformer": dict(encoder_hidden_size=64),
    "blip_text_model": dict(encoder_hidden_size=64),
    "chameleon": dict(
        vocabulary_map={"<image>": 250}
        | {f"IMGIMG{c}Z": 200 + i for i, c in enumerate("ABCDEFGHIJ")}
    ),
    "chameleon_vqgan": dict(
        num_embeddings=10, base_channels=32, resolution=56, latent_channels=32, embed_dim=32
    ),
    "emu3": dict(
        vocabulary_map={"<image>": 250, "<|extra_200|>": 240}
        | {f"<|visual token {i:06}|>": 200 + i for i in range(16)}
    ),
    "emu3_vqgan": dict(codebook_size=16, base_channels=32, hidden_size=128, num_attention_heads=1),
    "cohere_compass_vision": dict(deepstack_visual_indexes=(0, 1, 2)),
    "deepseek_v4": dict(
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8)
    ),
    "deepseek_ocr2_text": dict(
        mlp_layer_types=["dense", *["sparse"] * 3], n_group=1, topk_group=1, num_experts_per_tok=2
    ),
    "dots3_note_vision_encoder": dict(adapter_in_dim=64, adapter_out_dim=64),
    "dots3_note_audio_encoder": dict(adapter_input_size=64, adapter_out_dim=64),
    "ernie4_5_vl_moe_text": dict(
        moe_intermediate_size=[32, 32], rope_parameters=ROPE | dict(mrope_section=[3, 3, 2])
    ),
    "florence_vision": dict(
        embed_dim=(16, 16, 32, 64),
        num_heads=(1, 1, 2, 2),
        num_groups=(1, 1, 2, 2),
        depths=(1, 1, 1, 1),
    ),
    "glm5_next_text": dict(
        qk_rope_head_dim=0,
        layer_types=INDEXED,
        indexer_types=["full"] * LAYERS,
        linear_head_dim=16,
        linear_num_heads=2,
        index_kpool=4,
    ),
    "glm5_next_vision": dict(projection_intermediate_size=64),
    "granite4_vision": dict(
        downsample_rate="1/2", deepstack_layer_map=[[0, 1]], spatial_target_layers=[2, 3]
    ),
    "janus_vqgan": dict(base_channels=32, num_embeddings=64, image_token_embed_dim=64),
    "kosmos-2": dict(latent_query_num=4),
    "kosmos_2_text_model": dict(layers=LAYERS),
    "mistral4": dict(head_dim=32),
    "mllama_vision_model": dict(
        intermediate_layers_indices=[1, 2], vision_output_dim=192, num_global_layers=1
    ),
    "molmo2_adapter": dict(vision_feature_layer=[3, 2]),
    "muse_spark": dict(projector_hidden_size=64),
    "muse_spark_text": dict(moe_hidden_size=64, layer_rope_theta=[5e5, 0] * 2),
    "muse_spark_audio": dict(hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
    "NemotronH_Omni_Reasoning_V3_Config": dict(
        vision_hidden_size=64, projector_hidden_size=64, image_token_id=250
    ),
    "pp_formulanet_vision": dict(
        post_conv_mid_channels=64, post_conv_out_channels=64, decoder_hidden_size=64
    ),
    "radio": dict(video_temporal_patch_size=2),
    "qwen2_5_omni_thinker": dict(vision_start_token_id=240, vision_end_token_id=241),
    "qwen3_omni_moe_thinker": dict(vision_start_token_id=240, vision_end_token_id=241),
    "qwen3_omni_moe_vision_encoder": dict(deepstack_visual_indexes=(0, 1, 2)),
    "nemotron3_5_transcribe_word_timestamp": dict(blank_token_id=255),
    "voxtral": dict(audio_token_id=250),
    "xlm": dict(emb_dim=64),
    "xlstm": dict(embedding_dim=64, qk_dim_factor=1.0),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
}
"""Fields that one class needs beside `FIELDS`, by the type of a configuration or its class."""
INNER = "blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2"
"""Models that generate by a model inside, whose prompts are embeddings."""
UNBUILT = {
    **dict.fromkeys(("gemma3n", "fast_vlm", "perception_lm"), "needs the library timm"),
    **dict.fromkeys(("dia", "kyutai_speech_to_text"), "its prompts are codes of audio"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts from the hidden states of another model",
    ),
    "vibevoice": "needs the library diffusers",
    "diffusion_gemma": "generates by diffusion",
    "pi0": "generates no tokens",
    "llama4": "its class of images raises in every forward of this release",
}
"""Why architectures are not asked, where the exception does not say so."""
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
    kind = type(config).__name__
    return type(config)(**fields | OWN.get(kind, OWN.get(getattr(config, "model_type", ""), {})))


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
    if hasattr(model, "build_delay_pattern_mask"):  # it delays codebooks up to this length
        model.generation_config.max_length = FIELDS["max_position_embeddings"]
    return model


def tokens(length: int, seed: int = 1) -> torch.Tensor:
    """Return random token ids `[1, length]`, none of them special."""
    return models.prompt(length, seed).clamp_max(SPECIAL - 1)


def ask(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the sequences `[B, S]` of greedy search, by the loop that all models share."""
    # No answer may pad or begin an image: the second turn would be another kind of prompt.
    special = [0, 1, *range(SPECIAL, 256)]
    options = dict(max_new_tokens=20, return_dict_in_generate=True, suppress_tokens=special)
    loop = type(model) if model.config.model_type in INNER else GenerationMixin
    answer = loop.generate(model, **inputs, **options, do_sample=False)
    return answer if isinstance(answer, torch.Tensor) else answer.sequences


def media(kind: str, model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs of an image or of audio that the model might take, and the tokens they fill."""
    seeded = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=seeded)

    config = model.config
    tries: list[dict[str, torch.Tensor]]
    if kind == "audio":
        shapes = (80, 3000), (80, 400), (128, 3000), (400, 80), (400, 128), (400, 160), (400, 560)
        tries = [{"input_features": noise(1, *shape)} for shape in shapes]
        tries += [{"input_values": noise(1, 16000)}, {"input_values": noise(1, 1, 16000)}]
    else:
        vision = getattr(config, "vision_config", config)
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
            {"pixel_values": noise(1, 2, 3, side, side), "image_sizes": sizes},
        ]
    word = "audio" if kind == "audio" else "image"
    token = getattr(config, f"{word}_token_id", getattr(config, f"{word}_token_index", None))
    if kind == "audio" and (config.is_encoder_decoder or token is None):
        yield from tries
        return
    name = f"get_{word}_features"
    owner = model.model if hasattr(getattr(model, "model", None), name) else model
    features = getattr(owner, name, None)
    for one in tries if features is not None and token is not None else ():
        taken = inspect.signature(features).parameters
        if not one.keys() <= taken.keys():
            continue
        shape = next(iter(one.values())).shape
        frames = shape[1] if shape[1] == 400 else shape[-1]
        for mask in (key for key in taken if "mask" in key and kind == "audio"):
            one[mask] = torch.ones(1, frames, dtype=torch.long)
        try:
            with torch.no_grad():
                found = features(**one)
        except Exception:
            continue
        found = getattr(found, "pooler_output", found)
        parts = found if isinstance(found, (list, tuple)) else [found]
        count = sum(part.numel() // part.shape[-1] for part in parts)
        yield one | {"tokens": torch.full((1, count), token)}


def needed(model: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs that models take which answer nothing without an image.

    Args:
        model: Of images and text.
        length: Tokens of the prompt.
    """
    seeded = torch.Generator().manual_seed(3)
    side = FIELDS["image_size"]
    image = {"pixel_values": torch.randn(1, 3, side, side, generator=seeded)}
    token, count = (
        getattr(model.config, x, None) for x in ("image_token_index", "num_query_tokens")
    )
    if token is not None and count is not None:
        filled = image | {"tokens": torch.full((1, count), token)}
        yield filled
        yield filled | {"qformer_input_ids": tokens(8)}
    token = getattr(model.config, "video_token_index", None)
    if token is not None and count is not None:
        frames = {"pixel_values": image["pixel_values"].expand(1, 4, -1, -1, -1)}
        filled = frames | {"tokens": torch.full((1, 4 * count), token)}
        yield filled | {"qformer_input_ids": tokens(8)}
    yield image
    marks = torch.zeros(1, length, dtype=torch.bool)
    marks[:, 4 : 4 + getattr(model.config, "latent_query_num", 0)] = True
    yield image | {"image_embeds_position_mask": marks}
    seen = torch.ones(1, length, 1, dtype=torch.long)
    yield {"pixel_values": image["pixel_values"][None], "image_attention_mask": seen}
    places = torch.arange(16).view(1, 16, 1)
    patches = torch.randn(1, 16, 768, generator=seeded)
    yield {"flattened_patches": torch.cat([places // 4, places % 4, patches], -1)}
    boxes = torch.randint(0, 1000, (1, 40, 4), generator=seeded).sort(-1).values
    yield image | {"input_ids": tokens(40, seed=9), "bbox": boxes}


def turns(kind: str, model: Any) -> Iterator[dict[str, Any]]:
    """Yield the inputs of two turns of a chat; the second one goes on from the first answer."""
    text = tokens(70)
    found = [{}] if kind in ("causal", "seq2seq") else [*media(kind, model), {}]
    found += needed(model, text.shape[1]) if kind == "image" else []
    encoded = kind != "causal" and model.config.is_encoder_decoder
    name = "decoder_input_ids" if encoded else "input_ids"
    base = {"input_ids": tokens(40, seed=9)} if kind == "seq2seq" else {}
    last = ValueError("no input fits")
    for extra in found:
        filled = extra.pop("tokens", text[:, :0])
        prompt = torch.cat([text[:, :20], filled, text[:, 20:]], 1)
        if encoded and filled.shape[1]:  # its encoder reads the image
            base, prompt = {"input_ids": prompt}, text
        inputs = base | extra | {name: prompt}
        try:
            answer = ask(model, inputs)
            break
        except Exception as error:
            last = last if extra else error
    else:
        raise last
    yield inputs
    if answer.shape[1] < prompt.shape[1]:  # some loops return what is new
        answer = torch.cat([prompt, answer], 1)
    longer = torch.cat([answer, tokens(15, seed=2)], 1)
    for key in inputs.keys() & {"image_attention_mask", "image_embeds_position_mask"}:
        mask, more = inputs[key], longer.shape[1] - prompt.shape[1]
        inputs = inputs | {
            key: torch.cat([mask, mask[:, -1:].expand(-1, more, *mask.shape[2:])], 1)
        }
    yield inputs | {name: longer}


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
            said_so = f"{type(error).__name__}: {str(error).strip()[:100]}"
            outcome.why = f"not built: {UNBUILT.get(name, said_so)}"
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
        with redirect_stdout(sys.stderr):  # some models print
            outcome = judge(*line.split())
        print(json.dumps(asdict(outcome)), flush=True)


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
    parser.add_argument("--json", type=Path, help="file of outcomes to renew")
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
        rows = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
        kept = {(row[0], row[1]): row for row in rows}
        kept |= {(one.kind, one.name): [*asdict(one).values()] for one in found}
        named = [(k, n) for k in KINDS for n in sorted(KINDS[k]) if (k, n) in kept]
        record = dict(transformers=transformers.__version__, rows=[kept[case] for case in named])
        given.json.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
