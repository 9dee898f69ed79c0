"""Tiny models with random weights for the families in tiny_families.py, to check that inputs fit them."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.tiny_families import AUDIO, FAMILIES, GRID, IMAGE, SIDE, VIDEO, Family
from tests.support.tiny_models import processor

# Gemma 3n needs a package that is not installed (timm); Aria's images of 4900 patches take half a minute.
WITH_MODELS = [
    family for family in FAMILIES if family.name not in {"Qwen2.5-Omni thinker", "Gemma 3n", "Aria"}
]


def _decoder(tokenizer: Any, **other: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **other,
    }


def _tower(**other: Any) -> dict[str, Any]:
    """The config of an image encoder."""
    return {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
        **other,
    }


def _ids(tokenizer: Any, **names: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


_SIZES = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}


def _qwen_vl(tokenizer: Any, **vision: Any) -> dict[str, Any]:
    tokens = {f"{m}_token_id": f"<|{m}_pad|>" for m in (IMAGE, VIDEO)}
    tokens |= {f"vision_{mark}_token_id": f"<|vision_{mark}|>" for mark in ("start", "end")}
    return {
        "text_config": _decoder(tokenizer, rope_parameters=_MROPE),
        "vision_config": {"depth": 2, "num_heads": 2, "patch_size": 8, **vision},
        **_ids(tokenizer, **tokens),
    }


def _configs(name: str, processor: Any) -> dict[str, Any]:
    """The arguments of a tiny config of the family."""
    tokenizer = processor.tokenizer
    llama = _decoder(tokenizer, model_type="llama")
    qwen = _decoder(tokenizer, model_type="qwen2")
    clip, siglip = _tower(model_type="clip_vision_model"), _tower(model_type="siglip_vision_model")
    gemma = {"sliding_window": 16, "rms_norm_eps": 1e-6}
    match name:
        case "Qwen2-VL":
            return _qwen_vl(tokenizer, embed_dim=16, hidden_size=32)
        case "Qwen2.5-VL":
            return _qwen_vl(tokenizer, **_SIZES, window_size=32, fullatt_block_indexes=[1])
        case "Qwen3-VL":
            return _qwen_vl(tokenizer, **_SIZES, num_position_embeddings=64, deepstack_visual_indexes=[0])
        case "Qwen2-Audio":
            return {
                "text_config": qwen,
                "audio_config": {
                    "num_mel_bins": 16,
                    "d_model": 16,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 24,
                    "max_source_positions": 150,
                },
                "audio_token_id": processor.audio_token_id,
            }
        case "LLaVA-1.5":
            return {
                "text_config": llama,
                "vision_config": clip,
                "image_token_id": processor.image_token_id,
                "vision_feature_layer": -1,
                "image_seq_length": 16,
            }
        case "LLaVA-NeXT":
            return {
                "text_config": llama,
                "vision_config": clip,
                "image_token_id": processor.image_token_id,
                "vision_feature_layer": -1,
                "image_grid_pinpoints": GRID,
                "image_seq_length": 16,
            }
        case "LLaVA-OneVision":
            return {
                "text_config": qwen,
                "vision_config": siglip,
                "image_token_id": processor.image_token_id,
                "video_token_id": processor.video_token_id,
                "vision_feature_layer": -1,
                "image_grid_pinpoints": GRID,
            }
        case "Idefics3":
            return {
                "text_config": llama,
                "vision_config": _tower(model_type="idefics3_vision"),
                "image_token_id": processor.image_token_id,
                "scale_factor": 2,
                "pad_token_id": 0,
            }
        case "Gemma 3":
            return {
                "text_config": _decoder(tokenizer, model_type="gemma3_text", **gemma),
                "vision_config": siglip,
                "mm_tokens_per_image": 4,
                **_ids(
                    tokenizer,
                    boi_token_index="<start_of_image>",
                    eoi_token_index="<end_of_image>",
                    image_token_index="<image_soft_token>",
                ),
            }
        case "Mistral 3 (Pixtral)":
            return {
                "text_config": _decoder(tokenizer, model_type="mistral"),
                "vision_config": _tower(model_type="pixtral", image_size=2 * SIDE, head_dim=8),
                "image_token_id": processor.image_token_id,
                "spatial_merge_size": 2,
                "vision_feature_layer": -1,
            }
        case "InternVL":
            return {
                "text_config": qwen,
                "vision_config": _tower(
                    model_type="internvl_vision", image_size=[SIDE, SIDE], patch_size=[8, 8]
                ),
                "image_token_id": processor.image_token_id,
                "image_seq_length": 4,
            }
        case "Ovis2":
            return {
                "text_config": qwen,
                "vision_config": _tower(hidden_stride=2, vocab_size=64, num_visual_indicator_tokens=5),
                "hidden_size": 32,
                "vocab_size": len(tokenizer),
                "image_token_id": tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
                "visual_indicator_token_ids": tokenizer.convert_tokens_to_ids(
                    ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
                ),
            }
        case "GLM-4V":
            special = {f"{m}_token_id": f"<|{m}|>" for m in (IMAGE, VIDEO)}
            special |= {f"{m}_start_token_id": f"<|begin_of_{m}|>" for m in (IMAGE, VIDEO)}
            special |= {f"{m}_end_token_id": f"<|end_of_{m}|>" for m in (IMAGE, VIDEO)}
            return {
                "text_config": _decoder(tokenizer, rope_parameters=_MROPE | {"partial_rotary_factor": 1.0}),
                "vision_config": {
                    "depth": 2,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_heads": 2,
                    "patch_size": 8,
                    "out_hidden_size": 32,
                    "image_size": 64,
                },
                **_ids(tokenizer, **special),
            }
        case "Gemma 4":
            return {
                "text_config": _decoder(
                    tokenizer,
                    vocab_size_per_layer_input=len(tokenizer),
                    hidden_size_per_layer_input=8,
                    global_head_dim=8,
                    layer_types=["sliding_attention", "full_attention"],
                    **gemma,
                ),
                "vision_config": _tower(num_key_value_heads=2, head_dim=8, patch_size=4),
                "audio_config": {
                    "hidden_size": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "subsampling_conv_channels": (16, 4),
                    "output_proj_dims": 24,
                },
                **_ids(
                    tokenizer,
                    boi_token_id="<|image>",
                    eoi_token_id="<image|>",
                    boa_token_id="<|audio>",
                    eoa_token_index="<audio|>",
                    **{f"{m}_token_id": f"<|{m}|>" for m in (IMAGE, AUDIO, VIDEO)},
                ),
            }
        case "Phi-4-multimodal":
            return _decoder(
                tokenizer,
                vision_config=_tower(image_size=448, patch_size=14, image_token_id=processor.image_token_id),
                audio_config={
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_blocks": 2,
                    "num_attention_heads": 2,
                    "ext_pw_out_channel": 16,
                    "depthwise_separable_out_channel": 16,
                    "nemo_conv_channels": 16,
                    "audio_token_id": processor.audio_token_id,
                },
            )
        case _:
            raise LookupError(name)


def tiny_model(family: Family) -> Any:
    """A random model of the family, in evaluation mode."""
    import torch
    import transformers

    model_class = getattr(transformers, family.model_class)
    torch.manual_seed(0)
    config = model_class.config_class(**_configs(family.name, processor(family.folder())))
    model = model_class(config).eval()
    # Random weights of the usual size would give the same token forever.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@cache
def checkpoint(name: str) -> str:
    """The folder of a family's processor, after adding a model to it."""
    family = next(family for family in FAMILIES if family.name == name)
    tiny_model(family).save_pretrained(family.folder())
    return family.folder()
