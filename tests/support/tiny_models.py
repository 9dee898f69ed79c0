"""Models for tests: the bundled one, and tiny random ones of other families."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.engine.base import EngineItem
from deployments.processor.arguments import DecodedItem
from deployments.processor.chat_encoder import ChatEncoder
from deployments.processor.checkpoint import BUNDLED, load_processor, load_prompting
from deployments.processor.exactness import only_what_is_exact
from deployments.processor.item_processor import ItemProcessor
from deployments.processor.settings import ProcessorSettings
from deployments.runtime.hashing import digest
from deployments.runtime.payload import pack_pieces
from deployments.stages.media_loader import MediaLoaderConfig
from deployments.types import Arrays, Chat, Media, Modality, Payload, VideoMetadata
from tests.support.paths import ROOT

OMNI = "tiny-omni"
DECODER = MediaLoaderConfig().decoder

# Tests only read from it. It is deleted when the process ends.
_SCRATCH = tempfile.TemporaryDirectory(prefix="headrace-tests-")

QWEN_VL_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('the role ' ~ message.role ~ ' is not known') -}}
{%- endif -%}
<|im_start|>{{ message.role }}{% if message.name %} ({{ message.name }}){% endif %}
{% if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>{% endif -%}"""


def _vl_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(BUNDLED[OMNI] / "tokenizer.json"), pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], special_tokens=True
    )
    tokenizer.add_tokens(["<think>"])
    return tokenizer


VL_SIZES = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}


@cache
def qwen_vl(patch_size: int = 8, max_pixels: int = 64 * 64, context: int = 512) -> str:
    """The folder of a random Qwen2.5-VL that never ends an answer. `<think>` is added, but not special."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    folder = Path(_SCRATCH.name) / f"qwen-vl-{max_pixels}"
    tokenizer = _vl_tokenizer()
    sizes = VL_SIZES | {"patch_size": patch_size}
    sizes["size"] = {"shortest_edge": 4 * patch_size**2, "longest_edge": max_pixels}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**sizes),
        tokenizer,
        Qwen2VLVideoProcessor(**sizes, cap_pixels_per_frame=False, fps=2),
        chat_template=QWEN_VL_TEMPLATE,
    ).save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": context,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": patch_size,
            "out_hidden_size": 64,
            "window_size": 4 * patch_size,
            "fullatt_block_indexes": [1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    # Random weights of the usual size would give the same token forever.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


@cache
def qwen3_vl() -> str:
    """The folder of a Qwen3-VL processor. It writes the time in plain text before each video frame."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    folder = Path(_SCRATCH.name) / "qwen3-vl"
    video_sizes = VL_SIZES | {"size": {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64 * 8}}
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(**VL_SIZES),
        _vl_tokenizer(),
        Qwen3VLVideoProcessor(**video_sizes),
        chat_template=QWEN_VL_TEMPLATE,
    ).save_pretrained(folder)
    return str(folder)


@cache
def wide_omni() -> str:
    """The folder of a tiny-omni with random weights, as wide as the corpus' embeddings."""
    import torch
    from transformers import AutoConfig, Qwen2_5OmniThinkerForConditionalGeneration

    folder = Path(_SCRATCH.name) / "wide-omni"
    shutil.copytree(BUNDLED[OMNI], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    config.text_config.hidden_size = config.audio_config.output_dim = config.vision_config.out_hidden_size = (
        2048
    )
    config.text_config.num_hidden_layers = config.text_config.num_key_value_heads = 1
    config.text_config.layer_types = ["full_attention"]
    config.text_config.num_attention_heads = 64
    config.text_config.intermediate_size = 64
    torch.manual_seed(0)
    Qwen2_5OmniThinkerForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


# For parametrize: nothing is built and torch is not imported before a test runs.
MODELS: dict[str, Callable[[], str]] = {"omni": lambda: OMNI, "qwen-vl": qwen_vl}


@cache
def processor(model: str) -> Any:
    return load_processor(model)


@cache
def item_processor(model: str) -> ItemProcessor:
    return only_what_is_exact(ItemProcessor(processor(model)))


def tokenizer(model: str) -> ChatEncoder:
    return ChatEncoder(load_prompting(model))


def accepts(model: str) -> frozenset[str]:
    """The arguments of the model's `forward`."""
    classes = {
        OMNI: "Qwen2_5OmniThinkerForConditionalGeneration",
        qwen_vl(): "Qwen2_5_VLForConditionalGeneration",
        qwen3_vl(): "Qwen3VLForConditionalGeneration",
    }
    return arguments_of(classes[model])


def arguments_of(model_class: str) -> frozenset[str]:
    """The arguments of the `forward` of a class of transformers."""
    import transformers

    return frozenset(inspect.signature(getattr(transformers, model_class).forward).parameters)


def image(seed: int, height: int = 40, width: int = 56) -> DecodedItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return _media(Modality.IMAGE, {"pixels": pixels})


def audio(seed: int, seconds: float = 1.0, rate: int = 16000) -> DecodedItem:
    samples = np.random.default_rng(seed).uniform(-1, 1, round(seconds * rate)).astype(np.float32)
    return _media(Modality.AUDIO, {"samples": samples})


def video(seed: int, frames: int = 6, height: int = 32, width: int = 48) -> DecodedItem:
    """Every fifth frame of a clip of 10 frames a second."""
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    metadata: VideoMetadata = {
        "total_num_frames": 5 * frames,
        "fps": 10.0,
        "frames_indices": list(range(0, 5 * frames, 5)),
        "duration": frames / 2,
    }
    return _media(Modality.VIDEO, {"frames": pixels}, metadata)


def _media(modality: Modality, arrays: Arrays, metadata: VideoMetadata | None = None) -> DecodedItem:
    for array in arrays.values():
        array.flags.writeable = False  # like arrays from the object store
    payload = Payload(0, inline=pickle.dumps(arrays, protocol=5))
    name = digest(modality, payload.inline or b"", repr(metadata))
    return Media(modality, name, payload, video_metadata=metadata), arrays


def engine_item(model: str, media: Media, arrays: Arrays) -> EngineItem:
    """An item as the MMPreprocessor stage sends it and the Model stage unpacks it."""
    (item,) = engine_items(model, [(media, arrays)])
    return item


def engine_items(
    model: str, items: Sequence[DecodedItem], settings: ProcessorSettings | None = None
) -> list[EngineItem]:
    """The items of one call of the processor."""
    return [
        EngineItem(done.record(None), done.features)
        for done in item_processor(model).process(items, settings)
    ]


def engine_items_of(
    model: str, items: Sequence[DecodedItem], settings: ProcessorSettings | None = None
) -> list[EngineItem]:
    """The items of a whole request, processed separately except for those of joint modalities."""
    done: dict[int, EngineItem] = {}
    for group in _groups(items, item_processor(model).joint):
        done |= dict(zip(group, engine_items(model, [items[i] for i in group], settings), strict=True))
    return [done[i] for i in range(len(items))]


def assembled(
    model: str,
    conversation: Chat,
    items: Sequence[DecodedItem],
    accepts: frozenset[str],
    settings: ProcessorSettings | None = None,
) -> dict[str, Any]:
    """The model's inputs, from items that were processed separately; `accepts`: see `assemble`."""
    import torch

    from deployments.engine.inputs import assemble

    ordered = engine_items_of(model, items, settings)
    prompt = tokenizer(model).encode(conversation, [item.features.affixes for item in ordered])
    return assemble(prompt, ordered, accepts, torch.float32)


def _groups(items: Sequence[DecodedItem], joint: Sequence[Modality]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for i, (media, _) in enumerate(items):
        groups.setdefault(media.modality if media.modality in joint else i, []).append(i)
    return list(groups.values())


def chat(*parts: str | Media) -> Chat:
    """A conversation of one user message."""
    return Chat([{"role": "user", "content": [_part(part) for part in parts]}])


def _part(part: str | Media) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": str(part.modality)}


def joint_call(
    model: str, conversation: Chat, items: Sequence[DecodedItem], **settings: Any
) -> dict[str, Any]:
    """Calls the processor once for the whole conversation, with media in the form that its users pass."""
    rest = iter(items)
    metadata = []
    messages = []
    for message in conversation.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [dict(part) for part in content]
            for part in content:
                if part["type"] == "text":
                    continue
                media, arrays = next(rest)
                part[part["type"]] = _as_users_pass(arrays)
                if media.video_metadata:
                    metadata.append(media.video_metadata)
        messages.append({**message, "content": content})
    kwargs: dict[str, Any] = {"return_tensors": "pt", **settings}
    if metadata:
        kwargs |= {"video_metadata": [metadata], "do_sample_frames": False}
        if "video_second_per_grid" in processor(model).model_input_names:
            kwargs["fps"] = 2.0
    return dict(
        processor(model).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs=kwargs
        )
    )


def _as_users_pass(arrays: Arrays) -> Image.Image | npt.NDArray[Any]:
    (array,) = arrays.values()
    return Image.fromarray(array) if array.ndim == 3 else array.copy()


def as_sent(value: Any) -> npt.NDArray[np.uint8]:
    """A tensor as clients send it: the base64 of a torch.save file."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return np.frombuffer(base64.b64encode(file.getvalue()), np.uint8)


async def in_pieces(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors and plain numbers as they reach the EmbeddingLoader stage."""
    return {
        name: np.array(value) if isinstance(value, list) else [await pack_pieces([as_sent(value).tobytes()])]
        for name, value in values.items()
    }


@dataclass(frozen=True)
class Encoded:
    """An item as a client may send it: as media, or as the embeddings that tiny-omni's encoder makes."""

    media: dict[str, Any]
    values: Any  # torch.Tensor [num_tokens, hidden size]
    embeds: dict[str, Any]


@cache
def encoded_by_omni(sample: str) -> Encoded:
    """`sample`: a file of docs/samples."""
    import torch

    from deployments.engine.inputs import encode
    from deployments.processor.checkpoint import load_model
    from deployments.stages.media_loader import MediaLoader

    data = (ROOT / "docs" / "samples" / sample).read_bytes()
    kind = {"png": "image", "wav": "audio", "mp4": "video"}[sample[-3:]]
    uri = f"data:;base64,{base64.b64encode(data).decode()}"
    media = MediaLoader(MediaLoaderConfig())._decode_now(
        data, "", Modality(kind), item_processor(OMNI).spec().options, threading.Event()
    )
    assert media.payload is not None
    assert media.payload.inline is not None  # there is no object store
    item = engine_item(OMNI, media, pickle.loads(media.payload.inline))
    with torch.inference_mode():
        values = encode(load_model(OMNI, "cpu", "auto"), item)
    tensors = {f"{kind}_embeds": values}
    for name in ("image_grid_thw", "video_grid_thw", "video_second_per_grid"):
        if name in item.arrays:
            tensors[name] = torch.from_numpy(item.arrays[name])
    sent = {name: as_sent(tensor).tobytes().decode() for name, tensor in tensors.items()}
    return Encoded(
        {"type": f"{kind}_url", f"{kind}_url": {"url": uri}},
        values,
        {"type": f"{kind}_embeds", f"{kind}_embeds": sent},
    )
