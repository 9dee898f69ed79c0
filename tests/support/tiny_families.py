"""Tiny processors of many families, with a chat template in each family's manner.

Each is a folder written by `save_pretrained`, so that it is loaded like any checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from deployments.processor.arguments import DecodedItem
from deployments.processor.checkpoint import BUNDLED
from deployments.types import Chat
from tests.support.tiny_models import (
    OMNI,
    VL_SIZES,
    arguments_of,
    assembled,
    audio,
    image,
    joint_call,
    qwen3_vl,
    qwen_vl,
    video,
)

_SCRATCH = tempfile.TemporaryDirectory(prefix="headrace-families-")

SIDE = 32  # pixels: the image size of families that have only one
SQUARE = {"height": SIDE, "width": SIDE}
# Sizes in which families that cut images into tiles arrange them.
GRID = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]

IMAGE, AUDIO, VIDEO = "image", "audio", "video"


@dataclass(frozen=True)
class Family:
    name: str
    modalities: tuple[str, ...]
    model_class: str  # in transformers
    folder: Callable[[], str]

    def __str__(self) -> str:
        return self.name


def chat_template(
    turn: tuple[str, str],
    media: Mapping[str, str],
    generation: str,
    *,
    opening: str = "",
    roles: Mapping[str, str] | None = None,
    trim: bool = False,
) -> str:
    """`turn`: the text before and after the content of a message, with ROLE in place of its role."""
    before, after = (repr(part).replace("ROLE", "' ~ role ~ '") for part in turn)
    branches = "".join(
        f"{{%- elif part.type == '{modality}' -%}}{{{{ {written!r} }}}}"
        for modality, written in media.items()
    )
    filtered = " | trim" if trim else ""
    return (
        f"{{%- set roles = {dict(roles or {})!r} -%}}{{{{ {opening!r} }}}}"
        "{%- for message in messages -%}"
        "{%- set role = roles.get(message.role, message.role) -%}"
        f"{{{{ {before} }}}}"
        "{%- if message.name %}{{ '(' ~ message.name ~ ') ' }}{% endif -%}"
        f"{{%- if message.content is string -%}}{{{{ message.content{filtered} }}}}"
        "{%- else -%}{%- for part in message.content -%}"
        f"{{%- if part.type == 'text' -%}}{{{{ part.text{filtered} }}}}{branches}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}"
        f"{{{{ {after} }}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{ {generation!r} }}}}{{%- endif -%}}"
    )


# Three kinds of tokenizers: one of bytes; one like SentencePiece, with a blank before every piece of text;
# and one like Gemma's, in which several line breaks are one token that is not special.


def _of_bytes(
    special: Sequence[str | AddedToken], named: Mapping[str, str] | None = None, **kwargs: Any
) -> Any:
    from transformers import PreTrainedTokenizerFast

    kwargs.setdefault("pad_token", "<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(BUNDLED[OMNI] / "tokenizer.json"), extra_special_tokens=dict(named or {}), **kwargs
    )
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


_CORPUS = [
    "You are a helpful assistant. What is it? And this? A circle. Be brief. Sure? How many do you see",
    "USER: ASSISTANT: system user model assistant \n\n image 1 video 2 audio 3 frame 00:01",
]


def _of_pieces(
    special: list[str], *, prepend: bool, bos: str, added: list[str], named: Mapping[str, str] | None = None
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    blank = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank] if prepend else [blank])
    if not prepend:
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<pad>", "<eos>", bos, "<unk>", *all_bytes], show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    trained = json.loads(backend.to_str())
    trained["added_tokens"] = [t for t in trained["added_tokens"] if t["content"] not in all_bytes]
    backend = Tokenizer.from_str(json.dumps(trained))
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=dict(named or {}),
    )
    tokenizer.add_tokens(added)
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def _like_llama(special: list[str], added: list[str] | None = None) -> Any:
    return _of_pieces(special, prepend=True, bos="<s>", added=added or [])


def _like_gemma(special: list[str], named: Mapping[str, str]) -> Any:
    runs = ["\n" * length for length in range(1, 8)]
    return _of_pieces(special, prepend=False, bos="<bos>", added=runs, named=named)


def _saved(name: str, processor: Any) -> str:
    folder = Path(_SCRATCH.name) / name
    processor.save_pretrained(folder)
    return str(folder)


_CHATML = (("<|im_start|>ROLE\n", "<|im_end|>\n"), "<|im_start|>assistant\n")
_VICUNA = {"user": "USER: ", "assistant": "ASSISTANT: ", "system": ""}
_INST = {"user": "[INST] ", "assistant": "", "system": "<<SYS>> "}


@cache
def _qwen2_vl() -> str:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    media = {m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in (IMAGE, VIDEO)}
    return _saved(
        "qwen2-vl",
        Qwen2VLProcessor(
            Qwen2VLImageProcessor(**VL_SIZES),
            _of_bytes(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]),
            Qwen2VLVideoProcessor(**VL_SIZES),
            chat_template=chat_template(_CHATML[0], media, _CHATML[1]),
        ),
    )


@cache
def _qwen2_audio() -> str:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return _saved(
        "qwen2-audio",
        Qwen2AudioProcessor(
            WhisperFeatureExtractor(feature_size=16, chunk_length=3),
            _of_bytes(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]),
            chat_template=chat_template(
                _CHATML[0], {AUDIO: "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n"}, _CHATML[1]
            ),
        ),
    )


@cache
def _llava() -> str:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return _saved(
        "llava",
        LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE),
            _like_llama(["<image>"]),
            patch_size=8,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
            chat_template=chat_template(("ROLE", " "), {IMAGE: "<image>\n"}, "ASSISTANT:", roles=_VICUNA),
        ),
    )


@cache
def _llava_next() -> str:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    return _saved(
        "llava-next",
        LlavaNextProcessor(
            LlavaNextImageProcessor(
                size={"shortest_edge": SIDE}, crop_size=SQUARE, image_grid_pinpoints=GRID
            ),
            _like_llama(["<image>"]),
            patch_size=8,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
            chat_template=chat_template(("ROLE", " [/INST] "), {IMAGE: "<image>\n"}, "", roles=_INST),
        ),
    )


@cache
def _llava_onevision() -> str:
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    return _saved(
        "llava-onevision",
        LlavaOnevisionProcessor(
            LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=GRID),
            _of_bytes(["<image>", "<video>"]),
            LlavaOnevisionVideoProcessor(size=SQUARE),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=chat_template(_CHATML[0], {IMAGE: "<image>\n", VIDEO: "<video>\n"}, _CHATML[1]),
        ),
    )


@cache
def _idefics3() -> str:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *cells]
    return _saved(
        "idefics3",
        Idefics3Processor(
            Idefics3ImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}),
            _of_bytes(special),
            image_seq_len=4,
            chat_template=chat_template(
                ("ROLE:", "<end_of_utterance>\n"),
                {IMAGE: "<image>"},
                "Assistant:",
                opening="<|im_start|>",
                roles={"user": "User", "assistant": "Assistant", "system": "System"},
            ),
        ),
    )


_GEMMA_TURN = ("<start_of_turn>ROLE\n", "<end_of_turn>\n")


@cache
def _gemma3() -> str:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    return _saved(
        "gemma3",
        Gemma3Processor(
            Gemma3ImageProcessor(size=SQUARE),
            _like_gemma(["<start_of_turn>", "<end_of_turn>"], named),
            image_seq_length=4,
            chat_template=chat_template(
                _GEMMA_TURN,
                {IMAGE: "<start_of_image>"},
                "<start_of_turn>model\n",
                opening="<bos>",
                roles={"assistant": "model"},
                trim=True,
            ),
        ),
    )


@cache
def _gemma3n() -> str:
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
        "audio_token": "<audio_soft_token>",
    }
    return _saved(
        "gemma3n",
        Gemma3nProcessor(
            Gemma3nAudioFeatureExtractor(feature_size=16),
            SiglipImageProcessor(size=SQUARE, do_normalize=False),
            _like_gemma(["<start_of_turn>", "<end_of_turn>"], named),
            image_seq_length=4,
            audio_seq_length=6,
            chat_template=chat_template(
                _GEMMA_TURN,
                {IMAGE: "<image_soft_token>", AUDIO: "<audio_soft_token>"},
                "<start_of_turn>model\n",
                opening="<bos>",
                roles={"assistant": "model"},
                trim=True,
            ),
        ),
    )


@cache
def _gemma4() -> str:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    return _saved(
        "gemma4",
        Gemma4Processor(
            Gemma4AudioFeatureExtractor(feature_size=16),
            Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),
            _like_gemma(["<|turn>", "<turn|>", "<|video|>"], named),
            Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, num_frames=4),
            chat_template=chat_template(
                ("<|turn>ROLE\n", "<turn|>\n"),
                {m: f"<|{m}|>" for m in (IMAGE, AUDIO, VIDEO)},
                "<|turn>model\n",
                opening="<bos>",
                roles={"assistant": "model"},
                trim=True,
            ),
        ),
    )


@cache
def _mistral3() -> str:
    from transformers import PixtralImageProcessor, PixtralProcessor

    return _saved(
        "mistral3",
        PixtralProcessor(
            PixtralImageProcessor(patch_size=8, size={"longest_edge": 2 * SIDE}),
            _of_bytes(["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]),
            patch_size=8,
            spatial_merge_size=2,
            chat_template=chat_template(
                ("ROLE", "[/INST]"),
                {IMAGE: "[IMG]"},
                "",
                opening="<s>",
                roles={"user": "[INST]", "assistant": "", "system": "[INST]"},
            ),
        ),
    )


@cache
def _internvl() -> str:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return _saved(
        "internvl",
        InternVLProcessor(
            GotOcr2ImageProcessor(size=SQUARE, min_patches=1, max_patches=4),
            _of_bytes([], named),
            InternVLVideoProcessor(size=SQUARE),
            image_seq_length=4,
            chat_template=chat_template(
                _CHATML[0], {IMAGE: "<IMG_CONTEXT>\n", VIDEO: "<video>\n"}, _CHATML[1]
            ),
        ),
    )


@cache
def _phi4() -> str:
    from transformers import (
        Phi4MultimodalFeatureExtractor,
        Phi4MultimodalImageProcessor,
        Phi4MultimodalProcessor,
    )

    roles = [AddedToken(f"<|{role}|>", rstrip=True) for role in ("system", "user", "assistant", "end")]
    return _saved(
        "phi4-multimodal",
        Phi4MultimodalProcessor(
            Phi4MultimodalImageProcessor(dynamic_hd=4),
            Phi4MultimodalFeatureExtractor(),
            _of_bytes(roles, {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}),
            chat_template=chat_template(
                ("<|ROLE|>", "<|end|>"),
                {IMAGE: "<|endoftext10|>", AUDIO: "<|endoftext11|>"},
                "<|assistant|>",
            ),
        ),
    )


@cache
def _aria() -> str:
    from transformers import AriaImageProcessor, AriaProcessor

    return _saved(
        "aria",
        AriaProcessor(
            AriaImageProcessor(max_image_size=490),
            _of_bytes(
                ["<fim_prefix>", "<fim_suffix>"], {"image_token": "<|img|>"}, unk_token="<|endoftext|>"
            ),
            chat_template=chat_template(_CHATML[0], {IMAGE: "<fim_prefix><|img|><fim_suffix>"}, _CHATML[1]),
            size_conversion={490: 128, 980: 256},
        ),
    )


@cache
def _ovis2() -> str:
    from transformers import Ovis2ImageProcessor, Ovis2Processor

    special = ["IMG_START", "IMG_ATOM", "IMG_GRID", "IMG_COL", "IMG_ROW", "IMG_END", "image"]
    return _saved(
        "ovis2",
        Ovis2Processor(
            Ovis2ImageProcessor(size=SQUARE, max_patches=4),
            _of_bytes([f"<{token}>" for token in special]),
            image_seq_length=4,
            chat_template=chat_template(_CHATML[0], {IMAGE: "<image>\n"}, _CHATML[1]),
        ),
    )


@cache
def _glm4v() -> str:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    special = [f"<|{mark}_of_{m}|>" for mark in ("begin", "end") for m in (IMAGE, VIDEO)]
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant")]
    media = {m: f"<|begin_of_{m}|><|{m}|><|end_of_{m}|>" for m in (IMAGE, VIDEO)}
    return _saved(
        "glm4v",
        Glm4vProcessor(
            Glm4vImageProcessor(**VL_SIZES),
            _of_bytes([*special, *roles, "<|image|>", "<|video|>", "[gMASK]", "<sop>"]),
            Glm4vVideoProcessor(**VL_SIZES),
            chat_template=chat_template(("<|ROLE|>\n", ""), media, "<|assistant|>\n", opening="[gMASK]<sop>"),
        ),
    )


@cache
def paligemma() -> str:
    """A family that cannot be served, because its processor changes the text around the images."""
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 4
    template = chat_template(("", ""), {IMAGE: "<image>"}, "")
    return _saved(
        "paligemma", PaliGemmaProcessor(images, _like_gemma(["<image>"], {}), chat_template=template)
    )


FAMILIES = [
    Family("Qwen2-VL", (IMAGE, VIDEO), "Qwen2VLForConditionalGeneration", _qwen2_vl),
    Family("Qwen2.5-VL", (IMAGE, VIDEO), "Qwen2_5_VLForConditionalGeneration", qwen_vl),
    Family("Qwen3-VL", (IMAGE, VIDEO), "Qwen3VLForConditionalGeneration", qwen3_vl),
    Family(
        "Qwen2.5-Omni thinker",
        (IMAGE, AUDIO, VIDEO),
        "Qwen2_5OmniThinkerForConditionalGeneration",
        lambda: OMNI,
    ),
    Family("Qwen2-Audio", (AUDIO,), "Qwen2AudioForConditionalGeneration", _qwen2_audio),
    Family("LLaVA-1.5", (IMAGE,), "LlavaForConditionalGeneration", _llava),
    Family("LLaVA-NeXT", (IMAGE,), "LlavaNextForConditionalGeneration", _llava_next),
    Family("LLaVA-OneVision", (IMAGE, VIDEO), "LlavaOnevisionForConditionalGeneration", _llava_onevision),
    Family("Idefics3", (IMAGE,), "Idefics3ForConditionalGeneration", _idefics3),
    Family("Gemma 3", (IMAGE,), "Gemma3ForConditionalGeneration", _gemma3),
    Family("Gemma 3n", (IMAGE, AUDIO), "Gemma3nForConditionalGeneration", _gemma3n),
    Family("Gemma 4", (IMAGE, AUDIO, VIDEO), "Gemma4ForConditionalGeneration", _gemma4),
    Family("Mistral 3 (Pixtral)", (IMAGE,), "Mistral3ForConditionalGeneration", _mistral3),
    Family("InternVL", (IMAGE, VIDEO), "InternVLForConditionalGeneration", _internvl),
    Family("Phi-4-multimodal", (IMAGE, AUDIO), "Phi4MultimodalForCausalLM", _phi4),
    Family("Aria", (IMAGE,), "AriaForConditionalGeneration", _aria),
    Family("Ovis2", (IMAGE,), "Ovis2ForConditionalGeneration", _ovis2),
    Family("GLM-4V", (IMAGE, VIDEO), "Glm4vForConditionalGeneration", _glm4v),
]


def samples(family: Family) -> list[DecodedItem]:
    """Three items of each modality in different sizes, the modalities in turn."""
    return [_SAMPLES[modality](i) for i in range(3) for modality in family.modalities]


# All videos have the same number of frames, because some processors stack them.
_SAMPLES: dict[str, Callable[[int], DecodedItem]] = {
    IMAGE: lambda i: image(i, *((40, 56), (100, 30), (560, 270))[i]),
    AUDIO: lambda i: audio(i, (1.0, 1.73, 0.5)[i]),
    VIDEO: lambda i: video(i, 6, *((32, 48), (64, 24), (40, 40))[i]),
}


def conversation(items: Sequence[DecodedItem]) -> Chat:
    """Spreads items over three of six messages, with and without text before, between and after them."""
    first, *rest = [{"type": str(media.modality)} for media, _ in items]
    middle, last = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    text = [{"type": "text", "text": text} for text in ("And this?", " \n so ", "\n\nReally? ")]
    return Chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [first, text[0], *middle]},
            {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [text[1], *last[:1], text[2], *last[1:], text[0]]},
        ]
    )


def compared(
    family: Family, chat: Chat, items: Sequence[DecodedItem], **settings: int | bool
) -> dict[str, bool]:
    """Compares items that were processed separately with one call for all: tensor name -> equal bits."""
    import torch

    folder = family.folder()
    ours = assembled(folder, chat, items, arguments_of(family.model_class), settings)
    theirs = joint_call(folder, chat, items, **settings)
    both = ours.keys() & theirs.keys()
    return {
        name: name in both
        and ours[name].dtype == theirs[name].dtype
        and torch.equal(ours[name], theirs[name])
        for name in sorted(ours.keys() | theirs.keys())
    }
