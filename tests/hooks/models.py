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


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def roberta() -> Any:
    """A decoder whose own positions begin behind the padding's, and those of `generate` at 0."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SMALL | dict(is_decoder=True, num_key_value_heads=4))
    model: Any = transformers.RobertaForCausalLM(config).eval()
    model.roberta.embeddings.position_embeddings.weight.data *= 30
    return model


def _mistral() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=24))


def _qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED))


def _gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(
        **GROUPED,
        sliding_window=24,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt_oss() -> torch.nn.Module:
    config = transformers.GptOssConfig(
        **GROUPED,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return transformers.GptOssForCausalLM(config)


def _deepseek_v3() -> torch.nn.Module:
    config = transformers.DeepseekV3Config(
        **SMALL | dict(num_key_value_heads=4),
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _falcon() -> torch.nn.Module:
    config = transformers.FalconConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.FalconForCausalLM(config)


def _bloom() -> torch.nn.Module:
    config = transformers.BloomConfig(
        vocab_size=256,
        hidden_size=64,
        n_layer=4,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.BloomForCausalLM(config)


def _falcon_h1() -> torch.nn.Module:
    config = transformers.FalconH1Config(
        **GROUPED,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=16,
    )
    return transformers.FalconH1ForCausalLM(config)


def _qwen3_next() -> torch.nn.Module:
    config = transformers.Qwen3NextConfig(
        **GROUPED,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    return transformers.Qwen3NextForCausalLM(config)


_MAMBA2 = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_chunk_size=16,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
)
_CONV = dict(layer_types=["conv", "full_attention"] * 2, conv_L_cache=4)


def _jamba() -> torch.nn.Module:
    config = transformers.JambaConfig(
        **SMALL,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    )
    return transformers.JambaForCausalLM(config)


def _bamba() -> torch.nn.Module:
    config = transformers.BambaConfig(**SMALL, **_MAMBA2, attn_layer_indices=[1, 3])
    return transformers.BambaForCausalLM(config)


def _granite_hybrid() -> torch.nn.Module:
    config = transformers.GraniteMoeHybridConfig(
        **SMALL,
        **_MAMBA2,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=2,
        num_experts_per_tok=1,
        shared_intermediate_size=64,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _nemotron_h() -> torch.nn.Module:
    config = transformers.NemotronHConfig(
        **SMALL,
        hybrid_override_pattern="M*-M*",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
        head_dim=16,
    )
    return transformers.NemotronHForCausalLM(config)


def _zamba() -> torch.nn.Module:
    config = transformers.ZambaConfig(
        **SMALL | dict(num_hidden_layers=6),
        attn_layer_period=3,
        attn_layer_offset=2,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    )
    return transformers.ZambaForCausalLM(config)


def _qwen3_5() -> torch.nn.Module:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**GROUPED, **LINEAR))


def _olmo_hybrid() -> torch.nn.Module:
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SMALL, **LINEAR))


def _lfm2() -> torch.nn.Module:
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SMALL, **_CONV))


def _lfm2_moe() -> torch.nn.Module:
    config = transformers.Lfm2MoeConfig(
        **SMALL,
        **_CONV,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=1,
    )
    return transformers.Lfm2MoeForCausalLM(config)


# Models with a sparse indexer. Many heads make ties of its scores unlikely: a tie between tokens is
# broken otherwise in another number of columns, with or without pages.
_LATENT = SMALL | dict(
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
    head_dim=16,
    index_topk=8,
    index_head_dim=24,
    index_n_heads=16,
)
_SOME = dict(indexer_types=["full", "shared"] * 2)
_IMAGES = dict(num_attention_heads=4, hidden_size=64, intermediate_size=96, num_hidden_layers=1)


def _deepseek_v32() -> torch.nn.Module:
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**_LATENT))


def _axk2() -> torch.nn.Module:
    return transformers.AXK2ForCausalLM(transformers.AXK2Config(**_LATENT))


def _glm_moe_dsa() -> torch.nn.Module:
    return transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**_LATENT, **_SOME))


def _hy_v4() -> torch.nn.Module:
    return transformers.HYV4ForCausalLM(transformers.HYV4Config(**_LATENT, **_SOME))


def _dots3_note() -> torch.nn.Module:
    """Windows beside indexed layers."""
    config = transformers.Dots3NoteTextConfig(
        **_LATENT | dict(head_dim=32),
        layer_types=["indexed_attention", "sliding_attention"] * 2,
        sliding_window=24,
        shared_experts_intermediate_size=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=32,
        swa_kv_lora_rank=16,
        swa_head_dim=32,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=16,
    )
    return transformers.Dots3NoteForCausalLM(config)


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


def _qwen4_exp() -> torch.nn.Module:
    """Recurrent layers, and the positions of all tokens beside the indexer's keys."""
    config = transformers.Qwen4ExpTextConfig(
        **{name: value for name, value in GROUPED.items() if name != "intermediate_size"},
        layer_types=["linear_attention", "indexed_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_lowrank=16,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    )
    return transformers.Qwen4ExpForCausalLM(config)


def _minimax_m3() -> torch.nn.Module:
    """Blocks of columns chosen by an indexer, in a layer class of its own."""
    config = transformers.MiniMaxM3VLTextConfig(
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        rotary_dim=16,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
    )
    return transformers.MiniMaxM3VLForCausalLM(config)


def _deepseek_v4() -> torch.nn.Module:
    """Windows beside blocks of 4 and 8 tokens, each compressed to one entry."""
    latent = {name: value for name, value in _LATENT.items() if "nope" not in name}
    config = transformers.DeepseekV4Config(
        **latent | dict(num_key_value_heads=1, head_dim=32),
        sliding_window=24,
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        o_groups=2,
        o_lora_rank=16,
    )
    return transformers.DeepseekV4ForCausalLM(config)


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


_CAUSAL = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "bloom": _bloom,
}
_HYBRID = {"falcon_h1": _falcon_h1, "qwen3_next": _qwen3_next}
_RECURRENT = _HYBRID | {
    "bamba": _bamba,
    "granite_hybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5": _qwen3_5,
    "zamba": _zamba,
}
_INDEXED = {
    "axk2": _axk2,
    "deepseek_v32": _deepseek_v32,
    "dots3_note": _dots3_note,
    "glm5_next": _glm5_next,
    "glm_moe_dsa": _glm_moe_dsa,
    "hy_v4": _hy_v4,
    "minimax_m3_vl_text": _minimax_m3,
    "mistral_large4": _mistral_large4,
    **({} if OLD else {"qwen4_exp": _qwen4_exp}),  # has an indexer of another form there
}
_COMPRESSED = {"deepseek_v4": _deepseek_v4}
CAUSAL, HYBRID, RECURRENT = sorted(_CAUSAL), sorted(_HYBRID), sorted(_RECURRENT)
"""Models by what their layers keep: keys and values; a state beside them. `HYBRID` are a few."""
INDEXED = sorted(name for name in _INDEXED if name in transformers.CONFIG_MAPPING)
"""Models with the keys of a sparse indexer beside keys and values, that are installed."""


def causal(name: str) -> torch.nn.Module:
    """A decoder-only model by its architecture's name."""
    torch.manual_seed(0)
    tied = dict(factor=8.0, embeddings=1.0) if name == "bloom" else {}
    return sharpen((_CAUSAL | _RECURRENT | _INDEXED | _COMPRESSED)[name](), **tied)


def short() -> torch.nn.Module:
    """Return a Llama of two layers, for tests whose subject is not its depth."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED | dict(num_hidden_layers=2))
    return sharpen(transformers.LlamaForCausalLM(config))


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids `[1, length]` without specials."""
    return torch.randint(5, 250, (1, length), generator=torch.Generator().manual_seed(seed))
