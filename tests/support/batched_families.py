"""Tiny random models of the batched families, and items for them without a processor."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers as t

from deployments.engine.base import EngineItem
from deployments.engine.inputs import assemble
from deployments.processor.placeholders import run_lengths
from deployments.types import Arrays, MMFeatures, Modality, Prompt

VOCAB, MEDIA, VIDEO, OPENS, CLOSES = 200, 190, 191, 192, 193

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN_VISION: dict[str, object] = {"depth": 2, "num_heads": 2, "patch_size": 8}
_VISION_IDS = {
    "image_token_id": MEDIA,
    "video_token_id": VIDEO,
    "vision_start_token_id": OPENS,
    "vision_end_token_id": CLOSES,
}


@dataclass(frozen=True, slots=True)
class Family:
    model: Any
    item: Callable[[int], EngineItem]  # makes an item from a seed

    def inputs(self, prompt: Prompt, items: list[EngineItem]) -> dict[str, torch.Tensor]:
        """Returns the inputs of `generate`."""
        accepts = frozenset(inspect.signature(self.model.forward).parameters)
        return assemble(prompt, items, accepts, self.model.dtype)


def _random(model: Any) -> Any:
    """Enlarges the weights: with the usual ones, a model would repeat one token."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def _item(modality: Modality, token_ids: list[int], num_tokens: int, arrays: Arrays) -> EngineItem:
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()
    features = MMFeatures(modality, digest, num_tokens, run_lengths(token_ids), None, {})
    return EngineItem(features, arrays)


def _pixels(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _image(num_tokens: int, **arrays: Any) -> EngineItem:
    return _item(Modality.IMAGE, [OPENS] + [MEDIA] * num_tokens + [CLOSES], num_tokens, arrays)


def _qwen_image(seed: int) -> EngineItem:
    height, width = 4, 4 + 2 * (seed % 3)
    num_tokens = height * width // 4
    arrays = {
        "pixel_values": _pixels(seed, height * width, 3 * 2 * 8 * 8),
        "image_grid_thw": np.array([[1, height, width]]),
        "mm_token_type_ids": np.array([[0] + [1] * num_tokens + [0]]),
    }
    return _image(num_tokens, **arrays)


def _text() -> Family:
    return Family(_random(t.LlamaForCausalLM(t.LlamaConfig(**_LLAMA))), lambda seed: _image(0))


def _qwen2_vl() -> Family:
    vision = {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    config = t.Qwen2VLConfig(text_config=_LLAMA | _MROPE, vision_config=vision, **_VISION_IDS)
    return Family(_random(t.Qwen2VLForConditionalGeneration(config)), _qwen_image)


def _qwen2_5_vl() -> Family:
    vision = {**_QWEN_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    config = t.Qwen2_5_VLConfig(text_config=_LLAMA | _MROPE, vision_config=vision, **_VISION_IDS)
    return Family(_random(t.Qwen2_5_VLForConditionalGeneration(config)), _qwen_image)


def _llava() -> Family:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**_CLIP),
        text_config=t.LlamaConfig(**_LLAMA),
        image_token_index=MEDIA,
    )
    model = _random(t.LlavaForConditionalGeneration(config))
    return Family(model, lambda seed: _image(4, pixel_values=_pixels(seed, 1, 3, 28, 28)))


def _patched(model: Any) -> Family:
    """Makes images of several patches, and asks the model for the number of their tokens."""

    def item(seed: int) -> EngineItem:
        arrays = {
            "pixel_values": _pixels(seed, 1, 3, 3, 28, 28),
            "image_sizes": np.array([[28, 56 - seed % 4]]),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        with torch.no_grad():
            (embeds,) = model.model.get_image_features(**tensors, return_dict=True).pooler_output
        return _image(len(embeds), **arrays)

    return Family(model, item)


def _llava_next() -> Family:
    config = t.LlavaNextConfig(
        vision_config=t.CLIPVisionConfig(**_CLIP),
        text_config=t.LlamaConfig(**_LLAMA),
        image_token_index=MEDIA,
        image_grid_pinpoints=[[28, 56], [56, 28]],
    )
    return _patched(_random(t.LlavaNextForConditionalGeneration(config)))


def _llava_onevision() -> Family:
    config = t.LlavaOnevisionConfig(
        vision_config=t.SiglipVisionConfig(**_CLIP),
        text_config=t.Qwen2Config(**_LLAMA),
        image_token_index=MEDIA,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[28, 56], [56, 28]],
    )
    return _patched(_random(t.LlavaOnevisionForConditionalGeneration(config)))


def _internvl() -> Family:
    vision = {**_CLIP, "image_size": [28, 28], "patch_size": [7, 7]}
    config = t.InternVLConfig(
        vision_config=t.InternVLVisionConfig(**vision),
        text_config=t.Qwen2Config(**_LLAMA),
        image_token_id=MEDIA,
        image_seq_length=4,
    )
    model = _random(t.InternVLForConditionalGeneration(config))
    return Family(model, lambda seed: _image(8, pixel_values=_pixels(seed, 2, 3, 28, 28)))


def _qwen2_audio() -> Family:
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"num_mel_bins": 8, "max_source_positions": 20}
    config = t.Qwen2AudioConfig(audio_config=audio, text_config=_LLAMA, audio_token_index=MEDIA)
    model = _random(t.Qwen2AudioForConditionalGeneration(config))

    def item(seed: int) -> EngineItem:
        frames = 24 + 4 * (seed % 4)
        num_tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        arrays = {
            "input_features": _pixels(seed, 1, 8, 40),
            "feature_attention_mask": (np.arange(40) < frames).astype(np.int64)[None],
        }
        return _item(Modality.AUDIO, [OPENS] + [MEDIA] * num_tokens + [CLOSES], num_tokens, arrays)

    return Family(model, item)


_FAMILIES: dict[str, Callable[[], Family]] = {
    "text": _text,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "qwen2_audio": _qwen2_audio,
}
NAMES = list(_FAMILIES)


@cache
def family(name: str) -> Family:
    return _FAMILIES[name]()


def prompt(seed: int, items: list[EngineItem], num_text: int = 12) -> Prompt:
    """Returns random text with the items at random places."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(1, 180, num_text).tolist()
    at = sorted(rng.integers(0, num_text, len(items)).tolist())
    placeholders = [
        (item.features.modality, place + i) for i, (item, place) in enumerate(zip(items, at, strict=True))
    ]
    for _, place in placeholders:
        token_ids.insert(place, MEDIA)
    return Prompt(token_ids, placeholders)
