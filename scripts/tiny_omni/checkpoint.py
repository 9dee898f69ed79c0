"""tiny-omni's tokenizer, chat template, processor and untrained weights, and how they are saved."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from scripts.tiny_omni.conversations import (
    ASK_ALL,
    ASK_IDENTITY,
    ASK_ONE,
    FILLERS,
    GREETING,
    GREETINGS,
    IDENTITY,
    NO_MEDIA,
    REPLIES,
    SYSTEMS,
    WORDS,
)
from tests.support.synthetic_media import (
    COLOURS,
    MODALITIES,
    MOTIONS,
    SAMPLE_RATE,
    SHAPES,
    SOUNDS,
)

NUM_FRAMES = 8  # sampled from every clip, evenly, first and last included
PATCH, MERGE, TEMPORAL_PATCH = 8, 2, 4  # pixels, patches, frames
PIXELS = {"shortest_edge": 48 * 48, "longest_edge": 64 * 64}  # of an image or a frame: at most 16 tokens
HOP, N_FFT, NUM_MELS = 800, 1600, 64  # samples, samples, bands: 20 mel frames and 5 tokens a second
MIN_AUDIO_SAMPLES = SAMPLE_RATE * 3 // 10
POSITIONS_PER_SECOND = 8
MAX_POSITIONS = 4096
VOCAB_SIZE = 1024

SPECIAL_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
PAD, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- set count = namespace(image=0, audio=0, video=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- elif part.type == 'image' -%}
{%- set count.image = count.image + 1 -%}
{{- '\\nimage ' ~ count.image ~ ':<|vision_bos|><|IMAGE|><|vision_eos|>\\n' -}}
{%- elif part.type == 'audio' -%}
{%- set count.audio = count.audio + 1 -%}
{{- '\\naudio ' ~ count.audio ~ ':<|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
{%- elif part.type == 'video' -%}
{%- set count.video = count.video + 1 -%}
{{- '\\nvideo ' ~ count.video ~ ':<|vision_bos|><|VIDEO|><|vision_eos|>\\n' -}}
{%- else -%}
{{- raise_exception('content part of unknown type: ' ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE: any text goes in and comes back. The merges come from the conversations."""
    tokenizer = Tokenizer(models.BPE())
    # "; " is one piece, so that a word begins alike at the head of an answer and inside it. So is a digit.
    pieces = Regex(r"; |\n+| ?\p{L}+| ?\p{N}|[^\S\n]+|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN, END, *SPECIAL_TOKENS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["user\n", "assistant\n", "system\n"] * 20
    labels = [*SHAPES, *COLOURS, *SOUNDS, *MOTIONS]
    items = [
        f"{kind} {n}: {label}; {kind} {n}?" for kind in MODALITIES for n in range(10) for label in labels
    ]
    answers = [IDENTITY, GREETING, NO_MEDIA, "There is no image 1."] * 10
    texts = [*ASK_ALL, *ASK_ONE, *ASK_IDENTITY, *GREETINGS, *SYSTEMS, *FILLERS, *REPLIES]
    words = [f"{word} {word}" for word in WORDS]
    tokenizer.train_from_iterator([*roles, *items, *answers, *texts, *texts, *words], trainer)
    return tokenizer


def make_processor() -> Qwen2_5OmniProcessor:
    """The processor: what the server calls on each item."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        eos_token=END,
        pad_token=PAD,
        unk_token=None,
        bos_token=None,
        model_max_length=MAX_POSITIONS,
        extra_special_tokens=SPECIAL_TOKENS,
        clean_up_tokenization_spaces=False,
        # The processor class has a video size of its own, far too big here; the one below takes precedence.
        size=PIXELS,
    )
    vision = {
        "size": PIXELS,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        video_processor=Qwen2VLVideoProcessor(
            **vision, num_frames=NUM_FRAMES, do_sample_frames=False, cap_pixels_per_frame=False
        ),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=NUM_MELS,
            sampling_rate=SAMPLE_RATE,
            hop_length=HOP,
            n_fft=N_FFT,
            return_attention_mask=True,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(processor: Qwen2_5OmniProcessor) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """The untrained model."""
    ids = processor.tokenizer.convert_tokens_to_ids
    hidden = 128
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": NUM_MELS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "d_model": 96,
            "max_source_positions": 40,
            "n_window": 40,  # chunks of 80 mel frames: 4 s
            "output_dim": hidden,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
            "window_size": 1024,
            "fullatt_block_indexes": [0, 1],
            "out_hidden_size": hidden,
        },
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": False,
            "pad_token_id": ids(PAD),
            "eos_token_id": ids(END),
        },
        image_token_index=ids("<|IMAGE|>"),
        audio_token_index=ids("<|AUDIO|>"),
        video_token_index=ids("<|VIDEO|>"),
        vision_start_token_id=ids("<|vision_bos|>"),
        vision_end_token_id=ids("<|vision_eos|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
        audio_end_token_id=ids("<|audio_eos|>"),
        user_token_id=ids("user"),
        position_id_per_seconds=POSITIONS_PER_SECOND,
        pad_token_id=ids(PAD),
        eos_token_id=ids(END),
        tie_word_embeddings=False,
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    for module in model.modules():  # the stock 0.02 suits large models: here it would slow the start
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=ids(END), pad_token_id=ids(PAD), max_new_tokens=256
    )
    return model


def save(
    model: Qwen2_5OmniThinkerForConditionalGeneration, processor: Qwen2_5OmniProcessor, out: Path
) -> None:
    """Write the folder that `from_pretrained` reads.

    The weights are stored in half precision, for size alone: the configuration asks for float32.
    """
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    model.save_pretrained(out, state_dict=weights)
    processor.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)
