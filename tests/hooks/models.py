"""Tiny random models of the architectures that the tests cover, sharpened so that tokens vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
"""Whether transformers is older than the releases that are tested whole."""
SMALL = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GROUPED = SMALL | dict(head_dim=16)


def roberta() -> Any:
    """A decoder whose own positions begin behind the padding's, and those of `generate` at 0."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SMALL | dict(is_decoder=True, num_key_value_heads=4))
    model: Any = transformers.RobertaForCausalLM(config).eval()
    model.roberta.embeddings.position_embeddings.weight.data *= 30
    return model


_WINDOWS = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2)
_PLAIN = dict(vocab_size=256, hidden_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_MLA = dict(
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
)
_MAMBA2 = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_chunk_size=16,
)
_CONV = dict(layer_types=["conv", "full_attention"] * 2, conv_L_cache=4)
# Models with a sparse indexer. Many heads make ties of its scores unlikely: a tie between tokens is
# broken otherwise in another number of columns, with or without pages.
_LATENT = SMALL | _MLA | dict(head_dim=16, index_topk=8, index_head_dim=24, index_n_heads=16)
_SOME = dict(indexer_types=["full", "shared"] * 2)
_IMAGES = dict(num_attention_heads=4, hidden_size=64, intermediate_size=96, num_hidden_layers=1)


def _mistral_large4() -> torch.nn.Module:
    """Its fourth layer has no rotary part, so that its cache holds values of no width."""
    text = {name: value for name, value in _LATENT.items() if name != "q_lora_rank"}
    images = transformers.PixtralVisionConfig(**_IMAGES, image_size=28, patch_size=14)
    config = transformers.MistralLarge4Config(
        text_config=transformers.MistralLarge4TextConfig(**text, **_SOME), vision_config=images
    )
    return transformers.MistralLarge4ForConditionalGeneration(config)


def _glm5_next() -> torch.nn.Module:
    """Recurrent layers, latents without a rotary part, and gates beside the indexer's keys."""
    text = transformers.Glm5NextTextConfig(
        **_LATENT | dict(qk_rope_head_dim=0),
        layer_types=[
            "linear_attention",
            "deepseek_sparse_attention" if OLD else "indexed_attention",
        ]
        * 2,
        indexer_types=["full"] * 4,
        linear_head_dim=16,
        linear_num_heads=2,
        index_kpool=4,
        mlp_layer_types=["dense", "sparse"] * 2,
    )
    images = transformers.Glm5NextVisionConfig(
        depth=1,
        hidden_size=32,
        num_heads=2,
        image_size=28,
        patch_size=14,
        out_hidden_size=64,
        intermediate_size=32,
        projection_intermediate_size=64,
    )
    marks = ("image_token", "video_token", "image_start_token", "image_end_token")
    marks += ("video_start_token", "video_end_token")
    config = transformers.Glm5NextConfig(
        text_config=text,
        vision_config=images,
        **{f"{name}_id": 250 + n for n, name in enumerate(marks)},
    )
    return transformers.Glm5NextForConditionalGeneration(config)


def whisper() -> torch.nn.Module:
    """A speech model: its decoder's K and V depend on the encoder's input."""
    config = transformers.WhisperConfig(
        vocab_size=256,
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        d_model=64,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=256,
        decoder_start_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return _ready(transformers.WhisperForConditionalGeneration, config, factor=32.0, embeddings=1.0)


def t5() -> torch.nn.Module:
    """A text model with an encoder, without positions and, in `generate`, mostly without a mask."""
    config = transformers.T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _ready(transformers.T5ForConditionalGeneration, config)


IMAGE_TOKEN, IMAGE_PATCHES = 255, 4


def llava() -> torch.nn.Module:
    """A vision-language model whose images take `IMAGE_PATCHES` placeholder tokens."""
    text = transformers.LlamaConfig(**GROUPED)
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return _ready(transformers.LlavaForConditionalGeneration, config)


def _ready(
    kind: Callable[..., torch.nn.Module], config: object, **scales: float
) -> torch.nn.Module:
    torch.manual_seed(0)
    return sharpen(kind(config), **scales)


def sharpen(
    model: torch.nn.Module, *, factor: float = 4.0, embeddings: float = 4.0
) -> torch.nn.Module:
    """Scales the weights up, or a random model repeats one token whatever its cache holds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(embeddings if "embed" in name else factor)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.cache_implementation = None
    return model.float().eval()


Settings = dict[str, Any]
Kind = tuple[str, Settings] | Callable[[], torch.nn.Module]
"""A prefix of classes of transformers and settings of a configuration, or what makes a model."""
_CAUSAL: dict[str, Kind] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | dict(sliding_window=24)),
    "qwen3": ("Qwen3", GROUPED),
    "gemma3": ("Gemma3", GROUPED | _WINDOWS | dict(query_pre_attn_scalar=16)),
    "gpt_oss": ("GptOss", GROUPED | _WINDOWS | dict(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v3": ("DeepseekV3", SMALL | _MLA | dict(first_k_dense_replace=1)),
    "falcon": (
        "Falcon",
        _PLAIN | dict(num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=1024),
    ),
    "bloom": ("Bloom", _PLAIN | dict(n_layer=4, n_head=4)),
}
_HYBRID: dict[str, Kind] = {
    "falcon_h1": (
        "FalconH1",
        GROUPED
        | dict(mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1)
        | dict(mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=16),
    ),
    "qwen3_next": (
        "Qwen3Next",
        GROUPED | LINEAR | _EXPERTS | dict(shared_expert_intermediate_size=32),
    ),
}
_RECURRENT: dict[str, Kind] = _HYBRID | {
    "bamba": ("Bamba", SMALL | _MAMBA2 | dict(attn_layer_indices=[1, 3])),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        SMALL
        | _MAMBA2
        | dict(layer_types=["mamba", "attention"] * 2, num_local_experts=2)
        | dict(num_experts_per_tok=1, shared_intermediate_size=64),
    ),
    "jamba": (
        "Jamba",
        SMALL
        | dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1)
        | dict(mamba_d_state=8, mamba_dt_rank=4),
    ),
    "lfm2": ("Lfm2", SMALL | _CONV),
    "lfm2_moe": ("Lfm2Moe", SMALL | _CONV | _EXPERTS | dict(num_dense_layers=1)),
    "nemotron_h": (
        "NemotronH",
        SMALL
        | dict(hybrid_override_pattern="M*-M*", mamba_num_heads=8, mamba_head_dim=16)
        | dict(ssm_state_size=8, n_groups=1, chunk_size=16, head_dim=16),
    ),
    "olmo_hybrid": ("OlmoHybrid", SMALL | LINEAR),
    "qwen3_5": ("Qwen3_5", GROUPED | LINEAR),
    "zamba": (
        "Zamba",
        SMALL
        | dict(num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=2, n_mamba_heads=2)
        | dict(mamba_d_state=8, mamba_dt_rank=4),
    ),
}
_INDEXED: dict[str, Kind] = {
    "axk2": ("AXK2", _LATENT),
    "deepseek_v32": ("DeepseekV32", _LATENT),
    "dots3_note": (  # windows beside indexed layers
        "Dots3Note",
        _LATENT
        | dict(layer_types=["indexed_attention", "sliding_attention"] * 2, sliding_window=24)
        | dict(head_dim=32, shared_experts_intermediate_size=32, swa_head_dim=32)
        | dict(swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=32)
        | dict(swa_kv_lora_rank=16, swa_qk_nope_head_dim=16, swa_v_head_dim=16),
    ),
    "glm5_next": _glm5_next,
    "glm_moe_dsa": ("GlmMoeDsa", _LATENT | _SOME),
    "hy_v4": ("HYV4", _LATENT | _SOME),
    "minimax_m3_vl_text": (  # blocks of columns chosen by an indexer, in a layer class of its own
        "MiniMaxM3VL",
        GROUPED
        | dict(layer_types=["full_attention", "minimax_m3_sparse"] * 2, num_local_experts=4)
        | dict(num_experts_per_tok=2, dense_intermediate_size=64, shared_intermediate_size=32)
        | dict(rotary_dim=16, index_n_heads=2, index_head_dim=16)
        | dict(index_block_size=8, index_topk_blocks=2),
    ),
    "mistral_large4": _mistral_large4,
}
if not OLD:  # there, its indexer has another form
    _INDEXED["qwen4_exp"] = (  # the positions of all tokens beside the indexer's keys
        "Qwen4Exp",
        {name: size for name, size in GROUPED.items() if name != "intermediate_size"}
        | LINEAR
        | _EXPERTS
        | dict(layer_types=["linear_attention", "indexed_attention"] * 2, hc_lowrank=16)
        | dict(shared_expert_intermediate_size=32, indexer_n_heads=16, indexer_kv_heads=1)
        | dict(indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4),
    )
_COMPRESSED: dict[str, Kind] = {
    "deepseek_v4": (  # windows beside blocks of 4 and 8 tokens, each compressed to one entry
        "DeepseekV4",
        {name: size for name, size in _LATENT.items() if "nope" not in name}
        | dict(num_key_value_heads=1, head_dim=32, sliding_window=24, o_groups=2, o_lora_rank=16)
        | dict(layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2)
        | dict(compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8)),
    )
}
CAUSAL, HYBRID, RECURRENT = sorted(_CAUSAL), sorted(_HYBRID), sorted(_RECURRENT)
"""Models by what their layers keep: keys and values; a state beside them. `HYBRID` are a few."""
INDEXED = sorted(name for name in _INDEXED if name in transformers.CONFIG_MAPPING)
"""Models with the keys of a sparse indexer beside keys and values, that are installed."""


_KINDS = _CAUSAL | _RECURRENT | _INDEXED | _COMPRESSED


def _made(kind: Kind) -> torch.nn.Module:
    if callable(kind):
        return kind()
    model: Any = getattr(transformers, f"{kind[0]}ForCausalLM")
    return model(model.config_class(**kind[1]))


def causal(name: str) -> torch.nn.Module:
    """A decoder-only model by its architecture's name."""
    torch.manual_seed(0)
    tied = dict(factor=8.0, embeddings=1.0) if name == "bloom" else {}
    return sharpen(_made(_KINDS[name]), **tied)


def short() -> torch.nn.Module:
    """Return a Llama of two layers, for tests whose subject is not its depth."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED | dict(num_hidden_layers=2))
    return sharpen(transformers.LlamaForCausalLM(config))


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids `[1, length]` without specials."""
    return torch.randint(5, 250, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts `[1, S]` as the rows of one left-padded batch, and their mask."""
    most = max(row.shape[1] for row in rows)

    def wide(row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(row, (most - row.shape[1], 0))

    ids, mask = (torch.cat(list(map(wide, x))) for x in (rows, map(torch.ones_like, rows)))
    return dict(input_ids=ids, attention_mask=mask)


def pad_rows(ids: torch.Tensor, *pads: int) -> dict[str, torch.Tensor]:
    """Rows `[B, S]` of which the first tokens are padding instead, so many of each."""
    seen = (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long()
    return dict(input_ids=ids * seen, attention_mask=seen)
