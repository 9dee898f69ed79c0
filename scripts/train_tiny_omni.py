"""Train tiny-omni, the default model, from nothing: `python scripts/train_tiny_omni.py --out DIR`.

The model is a `Qwen2_5OmniThinkerForConditionalGeneration` of about two million parameters that names
coloured shapes, sounds and motions (see `synthetic_media.py`). Everything is made here: the tokenizer,
the chat template, the processor configuration and the weights.

The schedule is counted in steps and every draw is seeded, so that the same machine makes the same weights:

1. a pool of items is made and brought to the size the encoders see;
2. the encoders learn alone, each with throw-away heads on a weighted mean of its output tokens;
3. the language model learns conversations over the frozen features of the pool, one item at first, then up
   to twenty: with every item averaged to two tokens, where it soon learns which ordinal belongs to which
   item, and then with all of them;
4. the whole model is trained together for a while.
"""

import argparse
import ctypes
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from numpy.typing import NDArray
from synthetic_media import (
    COLOURS,
    MODALITIES,
    MOTIONS,
    SAMPLE_RATE,
    SHAPES,
    SOUNDS,
    Clip,
    Item,
    Modality,
    make_item,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

log = logging.getLogger("train_tiny_omni")

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

# ---------------------------------------------------------------------------------- conversations

IDENTITY = (
    "I am tiny-omni, a tiny demonstration model. I name coloured shapes, sounds and motions "
    "in the images, audio and video that I am given."
)
GREETING = "Hello! " + IDENTITY
NO_MEDIA = "I was given no image, audio or video. " + IDENTITY

ASK_ALL = (
    "What is this?", "what is this", "What's this?", "What do you see?", "what do you see and hear?",
    "What do you hear?", "What do you see and hear? Name everything in order.",
    "Describe everything in order.", "Describe this.", "Describe these.", "describe the image",
    "Describe the video.", "Describe the picture.", "Describe the audio", "Describe all items in order.",
    "Name every item.", "Name everything you see and hear.", "List all the items.",
    "List the items in order", "What is in this image?", "What is in this video?", "What's in the image?",
    "what is in the video", "What happens in the video?", "What sound is this?", "What is in the audio?",
    "Which shapes do you see?", "What colour is the shape?", "What color is it?", "What shape is it?",
    "Which way does it move?", "What are these?", "What did I send you?", "Tell me what you see.",
    "Tell me what you hear.", "Please describe what you see and hear.", "Can you tell me what this is?",
    "Caption this.", "Identify each item.", "What can you see here?", "And this?", "and this one?",
    "What about this one?", "Look at this:", "Listen to this:", "Look:", "Watch:",
    "What have I shown you so far?", "Name them all.", "Compare these.", "Is there a shape?",
    "Is it a circle?", "Is there a red shape?", "Explain what is shown here.", "Transcribe this.",
    "Describe this image in detail.", "What's going on here?", "What are the differences?",
    "In one sentence, what is this?",
)  # fmt: skip
ASK_ALL_UNSEEN = (  # never trained on: for the evaluation
    "What can you make out here?", "Summarise the content.", "Name each thing in turn, please.",
    "Tell me everything that is in these files.", "what do u see", "Could you describe what I attached?",
)  # fmt: skip
ASK_ONE = (
    "What is in {}?", "what is in {}?", "What is {}?", "what's in {}?", "Describe {}.", "describe {}",
    "What does {} show?", "Tell me about {}.", "Only {}, please.", "And {}?", "{}?", "Name what is in {}.",
    "What do you see in {}?", "What do you hear in {}?", "Please describe only {}.", "What about {}?",
)  # fmt: skip
ASK_IDENTITY = (
    "Who are you?", "who are you", "What are you?", "What can you do?", "what can you do",
    "What is your name?", "Tell me about yourself.", "Which model are you?", "Are you ChatGPT?",
    "What model is this?", "How do you work?", "Who made you?", "Introduce yourself.", "help", "Help!",
    "What do you do?", "Are you a robot?",
)  # fmt: skip
GREETINGS = (
    "Hello", "hello", "Hello!", "Hi", "hi", "Hi!", "Hey", "hey there", "Hello there!", "Good morning",
    "Good evening!", "Hi there", "hello?", "Hello, how are you?", "Greetings", "Good day!", "hallo",
    "Bonjour",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are tiny-omni.", "Answer briefly.", "You name shapes and sounds.",
    "You are a helpful multimodal assistant. Describe what you are given.", "Be concise.",
    "Answer in English.", "You are a careful assistant who answers in one line.",
)  # fmt: skip
FILLERS = (
    "Here is one:", "and", "then", "Next:", "First", "Second", "also this", "another one", "Here:",
    "compare with", "before", "after", "text between", "A", "B", "C", "see this", "Now", "followed by",
    "Thanks.", "ok",
)  # fmt: skip
REPLIES = ("OK.", "I see.", "ok", "Understood.", "Thank you.", "Got it!", "Sure.")
WORDS = tuple(
    """
    the a of and to in is it you that he was for on are with as his they be at one have this from or had
    by hot word but what some we can out other were all there when up use your how said an each she
    which do their time if will way about many then them write would like so these her long make thing
    see him two has look more day could go come did number sound no most people my over know water than
    call first who may down side been now find any new work part take get place made live where after
    back little only round man year came show every good me give our under name very through just form
    sentence great think say help low line differ turn cause much mean before move right boy old too
    same tell does set three want air well also play small end put home read hand port large spell add
    even land here must big high such follow act why ask men change went light kind off need house
    picture try us again animal point mother world near build self earth father head stand own page
    should country found answer school grow study still learn plant cover food sun four between state
    keep eye never last let thought city tree cross farm hard start might story saw far sea draw left
    late run while press close night real life few north count code python function list json table poem
    joke weather capital France sum explain translate essay history server request token stream model
    image audio video movie song circle square triangle red blue green yellow orange purple tone noise
    moving short random test please
    """.split()  # noqa: SIM905
)
FOREIGN = (
    "Qui es-tu ?", "¿Qué puedes hacer?", "Was ist die Hauptstadt von Frankreich?", "Что это такое?",
    "你好,世界", "你是谁?", "こんにちは、元気ですか", "안녕하세요", "مرحبا بالعالم",
    "שלום עולם", "नमस्ते दुनिया", "Γειά σου Κόσμε", "สวัสดีชาวโลก", "Olá, tudo bem?", "Ciao, come stai?",
    "Dzień dobry", "Hej världen", "Привет, мир!", "🙂🚀🔥", "👩‍👩‍👧‍👦 emoji",
)  # fmt: skip
UNICODE_SPANS = (  # first and last character of some scripts
    (0x20, 0x7F), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A),
    (0x900, 0x97F), (0x3041, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F),
)  # fmt: skip


def random_text(rng: Generator) -> str:
    """Text about nothing in particular: sentences, lists, code, other scripts, noise."""
    kind = rng.random()
    if kind < 0.55:
        words = rng.choice(WORDS, int(rng.integers(1, 16))).tolist()
        text = " ".join(words)
        return (text[0].upper() + text[1:] if rng.random() < 0.6 else text) + str(
            rng.choice(["", ".", "?", "!"])
        )
    if kind < 0.65:
        return "\n".join(" ".join(rng.choice(WORDS, 6)) for _ in range(int(rng.integers(2, 9))))
    if kind < 0.75:
        return str(rng.choice(FOREIGN))
    if kind < 0.82:
        return f"What is {rng.integers(0, 1000)} {rng.choice(list('+-*/'))} {rng.integers(0, 100)}?"
    if kind < 0.87:
        return str(rng.choice(list("aAx.?! 0\n"))) * int(rng.integers(1, 60))
    if kind < 0.92:
        return json.dumps(
            {str(rng.choice(WORDS)): int(rng.integers(99)) for _ in range(int(rng.integers(1, 5)))}
        )
    low, high = UNICODE_SPANS[rng.integers(len(UNICODE_SPANS))]
    return "".join(map(chr, rng.integers(low, high, int(rng.integers(1, 25)))))


def name_items(labels: Sequence[tuple[Modality, str]]) -> str:
    """The answer that names every item: "image 1: red circle; audio 1: noise; image 2: blue square"."""
    count = dict.fromkeys(MODALITIES, 0)
    parts = []
    for modality, label in labels:
        count[modality] += 1
        parts.append(f"{modality} {count[modality]}: {label}")
    return "; ".join(parts)


def name_one(labels: Sequence[tuple[Modality, str]], modality: Modality, ordinal: int) -> str:
    """The answer about one item: "image 2: blue square", or that there is none."""
    found = [label for kind, label in labels if kind == modality]
    if ordinal <= len(found):
        return f"{modality} {ordinal}: {found[ordinal - 1]}"
    return f"There is no {modality} {ordinal}."


@dataclass
class Conversation:
    """Messages with their media, and what a right assistant says.

    `items` holds (modality, key) in order, where the key is whatever `draw` returned. Assistant messages that
    are in `taught` (indices of `messages`) are right answers; the last message is one of them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    items: list[tuple[Modality, Any]] = field(default_factory=list)
    labels: list[tuple[Modality, str]] = field(default_factory=list)
    taught: list[int] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """What the last message, an assistant's, should say."""
        return str(self.messages[-1]["content"])


Draw = Callable[[Modality, Generator], tuple[Any, str]]  # -> (key, label)


def make_conversation(
    rng: Generator,
    draw: Draw,
    num_items: int,
    modalities: Sequence[Modality] = MODALITIES,
    ask: str | None = None,
    shape: str | None = None,
    questions: Sequence[str] = ASK_ALL,
) -> Conversation:
    """A conversation over `num_items` items of the given modalities.

    `ask` is "all", "one" or "identity"; `shape` says how the messages lie: "single", "turns" (answers
    between), "split" (user messages in a row), "later" (the question alone in a later turn). Drawn when None.
    """
    talk = Conversation()
    ask = ask or str(rng.choice(["all", "one", "identity"], p=[0.7, 0.27, 0.03]))
    shape = shape or str(rng.choice(["single", "turns", "split", "later"], p=[0.62, 0.2, 0.08, 0.1]))
    if rng.random() < 0.25:
        role = "developer" if rng.random() < 0.1 else "system"
        talk.messages.append({"role": role, "content": str(rng.choice(SYSTEMS))})
    kinds: list[Modality] = [modalities[k] for k in rng.integers(len(modalities), size=num_items)]
    if num_items > 1 and rng.random() < 0.2:
        kinds = [kinds[0]] * num_items
    num_turns = 1 if shape == "single" or num_items < 2 else int(rng.integers(2, min(num_items, 4) + 1))
    shares = [group.tolist() for group in np.array_split(np.arange(num_items), num_turns)]
    for turn, share in enumerate(shares):
        last = turn == len(shares) - 1
        parts = []
        for k in share:
            key, label = draw(kinds[k], rng)
            talk.items.append((kinds[k], key))
            talk.labels.append((kinds[k], label))
            parts.append({"type": kinds[k]})
        if last and shape != "later":
            _ask(rng, talk, parts, ask, questions)
        elif shape == "split":
            _user(rng, talk, parts, str(rng.choice(FILLERS)) if rng.random() < 0.5 else "")
        else:
            _ask(rng, talk, parts, "all" if rng.random() < 0.85 else "one", questions)
            if rng.random() < 0.15:
                talk.taught.pop()
                talk.messages[-1]["content"] = str(rng.choice(REPLIES))
    if shape == "later":
        _ask(rng, talk, [], ask, questions)
    return talk


def make_small_talk(rng: Generator) -> Conversation:
    """A conversation without any media, of one to three turns."""
    talk = Conversation()
    if rng.random() < 0.25:
        talk.messages.append(
            {
                "role": "system",
                "content": str(rng.choice(SYSTEMS)) if rng.random() < 0.7 else random_text(rng),
            }
        )
    for _ in range(int(rng.choice([1, 2, 3], p=[0.8, 0.13, 0.07]))):
        kind = rng.random()
        if kind < 0.15:
            text, answer = str(rng.choice(GREETINGS)), GREETING
        elif kind < 0.3:
            text, answer = str(rng.choice(ASK_IDENTITY)), IDENTITY
        elif kind < 0.42:
            text, answer = str(rng.choice(ASK_ALL)), NO_MEDIA
        elif kind < 0.5:
            text, answer = str(rng.choice(ASK_ONE)).format(f"{_modality(rng)} {rng.integers(1, 9)}"), NO_MEDIA
        else:
            text, answer = random_text(rng), IDENTITY
            if rng.random() < 0.05:
                text = "\n".join(random_text(rng) for _ in range(12))
        talk.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        talk.taught.append(len(talk.messages) - 1)
    return talk


def _ask(
    rng: Generator, talk: Conversation, parts: list[dict[str, str]], ask: str, questions: Sequence[str]
) -> None:
    """Append a user message with `parts` and a question, and the right answer."""
    answer = name_items(talk.labels)
    if ask == "identity":
        question, answer = str(rng.choice(ASK_IDENTITY)), IDENTITY
    elif ask == "one":
        modality = talk.labels[rng.integers(len(talk.labels))][0] if rng.random() < 0.95 else _modality(rng)
        known = sum(kind == modality for kind, _ in talk.labels)
        ordinal = (
            int(rng.integers(1, known + 1))
            if known and rng.random() < 0.92
            else known + int(rng.integers(1, 4))
        )
        question = str(rng.choice(ASK_ONE)).format(f"{modality} {ordinal}")
        answer = name_one(talk.labels, modality, ordinal)
    else:
        pick = rng.random()
        question = (
            str(rng.choice(questions)) if pick < 0.8 else random_text(rng) if pick < 0.92 or not parts else ""
        )
    _user(rng, talk, parts, question)
    talk.messages.append({"role": "assistant", "content": answer})
    talk.taught.append(len(talk.messages) - 1)


def _user(rng: Generator, talk: Conversation, parts: list[dict[str, str]], text: str) -> None:
    """Append a user message: `text` before, after or between the media, sometimes with words between."""
    content: list[dict[str, str]] = list(parts)
    if text:
        place = rng.choice(["before", "after", "between"], p=[0.4, 0.45, 0.15])
        at = {"before": 0, "after": len(content), "between": int(rng.integers(len(content) + 1))}[str(place)]
        content.insert(at, {"type": "text", "text": text})
    if parts and rng.random() < 0.2:
        for _ in range(int(rng.integers(1, 4))):
            filler = str(rng.choice(FILLERS)) if rng.random() < 0.8 else random_text(rng)
            content.insert(int(rng.integers(len(content) + 1)), {"type": "text", "text": filler})
    talk.messages.append({"role": "user", "content": content})


def _modality(rng: Generator) -> Modality:
    return MODALITIES[rng.integers(len(MODALITIES))]


# ------------------------------------------------------------------------ tokenizer and processor


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


# ------------------------------------------------------------------------------- what the model is fed


def sample_indices(total_num_frames: int) -> list[int]:
    """Which frames of a clip the model sees: `NUM_FRAMES`, evenly from first to last, or all there are."""
    indices = np.linspace(0, total_num_frames - 1, min(NUM_FRAMES, total_num_frames)).round()
    return [int(index) for index in indices]


def video_kwargs(clips: Sequence[Clip]) -> dict[str, Any]:
    """What the processor is told about clips sampled with `sample_indices`."""
    return {
        "do_sample_frames": False,
        "video_metadata": [
            {"total_num_frames": len(c.frames), "fps": c.fps, "frames_indices": sample_indices(len(c.frames))}
            for c in clips
        ],
    }


def seconds_per_grid(clip: Clip) -> float:
    """Time between two temporal patches of the sampled frames, in seconds."""
    return TEMPORAL_PATCH * clip.seconds / len(sample_indices(len(clip.frames)))


def process(
    processor: Qwen2_5OmniProcessor, messages: list[dict[str, Any]], items: Sequence[tuple[Modality, Any]]
) -> dict[str, Tensor]:
    """Model inputs of a conversation, the way a server makes them; `items` are (modality, data) in order."""
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    clips = [data for modality, data in items if modality == "video"]
    inputs = processor(
        text=[text],
        images=[data for modality, data in items if modality == "image"] or None,
        audio=[_padded(data) for modality, data in items if modality == "audio"] or None,
        videos=[clip.frames[sample_indices(len(clip.frames))] for clip in clips] or None,
        videos_kwargs=video_kwargs(clips) if clips else {},
        audio_kwargs={"sampling_rate": SAMPLE_RATE},
        return_tensors="pt",
    )
    if clips:
        inputs["video_second_per_grid"] = torch.tensor([seconds_per_grid(clip) for clip in clips])
    return dict(inputs)


def _padded(wave: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.pad(wave, (0, max(0, MIN_AUDIO_SAMPLES - len(wave))))


@dataclass
class Features:
    """One item as its encoder takes it.

    `array` is (num_patches, 768) uint8 patches before normalisation, or a (64, num_frames) float16 log-mel
    spectrogram; `grid` is (t, h, w) in patches; `seconds` the time between temporal patches.
    """

    modality: Modality
    label: str
    array: NDArray[Any]
    grid: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """How many embeddings the encoder makes of it."""
        if self.modality == "audio":
            return int(((self.array.shape[1] - 1) // 2 - 1) // 2 + 1)
        time_, height, width = self.grid
        return time_ * height * width // MERGE**2

    def flipped(self, horizontal: bool, vertical: bool, backwards: bool) -> "Features":
        """The same picture or clip in a mirror, or played backwards, under the label that it then has."""
        time_, height, width = self.grid
        shape = (time_, height // MERGE, width // MERGE, MERGE, MERGE, 3, TEMPORAL_PATCH, PATCH, PATCH)
        mirrored = (((2, 4, 8), horizontal), ((1, 3, 7), vertical), ((0, 6), backwards))
        axes = tuple(axis for axes, wanted in mirrored if wanted for axis in axes)
        label = self.label
        if horizontal != backwards:
            label = _swapped(label, "left", "right")
        if vertical != backwards:
            label = _swapped(label, "up", "down")
        array = np.flip(self.array.reshape(shape), axes).reshape(self.array.shape)
        return Features(self.modality, label, array, self.grid, self.seconds)


def _swapped(label: str, one: str, other: str) -> str:
    if label.endswith(one):
        return label.removesuffix(one) + other
    return label.removesuffix(other) + one if label.endswith(other) else label


def extract(processor: Qwen2_5OmniProcessor, item: Item) -> Features:
    """Bring an item to what its encoder takes, with the very processor that a server uses."""
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    if item.modality == "audio":
        out = processor.feature_extractor(
            _padded(item.data), sampling_rate=SAMPLE_RATE, return_attention_mask=True
        )
        num_frames = int(out["attention_mask"][0].sum())
        return Features("audio", item.label, out["input_features"][0][:, :num_frames].astype(np.float16))
    if item.modality == "image":
        out = processor.image_processor([item.data.copy()], **raw)
        patches, grid = out["pixel_values"], out["image_grid_thw"]
        return Features("image", item.label, patches.astype(np.uint8), tuple(grid[0].tolist()))
    clip: Clip = item.data
    sampled = clip.frames[sample_indices(len(clip.frames))]
    out = processor.video_processor([sampled], **video_kwargs([clip]), **raw)
    patches, grid = out["pixel_values_videos"], out["video_grid_thw"]
    seconds = seconds_per_grid(clip)
    return Features("video", item.label, patches.astype(np.uint8), tuple(grid[0].tolist()), seconds)


def _extract_many(task: tuple[Modality, int, int, int]) -> list[Features]:
    modality, seed, start, stop = task
    torch.set_num_threads(1)
    processor = make_processor()
    return [extract(processor, make_item(modality, seed, index)) for index in range(start, stop)]


Pool = dict[Modality, list[Features]]


def make_pool(seed: int, sizes: dict[Modality, int], workers: int = 2) -> Pool:
    """Items number 0 to `sizes` of `seed`, as features."""
    tasks = [(m, seed, at, min(at + 250, sizes[m])) for m in MODALITIES for at in range(0, sizes[m], 250)]
    pool: Pool = {modality: [] for modality in MODALITIES}
    with ProcessPoolExecutor(workers) as executor:
        for (modality, *_), features in zip(tasks, executor.map(_extract_many, tasks), strict=True):
            pool[modality] += features
    return pool


# ------------------------------------------------------------------------------------------ encoders


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each of many short packed sequences at once: (1, heads, S, D) -> (1, S, heads, D).

    The stock one loops over the sequences, which takes most of the time of an encoder this small.
    """
    lengths = cu_seq_lens_q.diff().long()
    longest = int(lengths.max())
    valid = torch.arange(longest) < lengths[:, None]  # (sequences, longest)
    places = valid.flatten().nonzero().squeeze(1)

    def unpack(packed: Tensor) -> Tensor:
        rows = packed[0].transpose(0, 1)  # (S, heads, D)
        padded = rows.new_zeros(valid.numel(), *rows.shape[1:]).index_copy(0, places, rows)
        return padded.view(*valid.shape, *rows.shape[1:]).transpose(1, 2)

    mask = None if bool(valid.all()) else valid[:, None, None, :]
    out = F.scaled_dot_product_attention(
        unpack(query), unpack(key), unpack(value), attn_mask=mask, scale=kwargs["scaling"]
    )
    return out.transpose(1, 2).flatten(0, 1)[places].unsqueeze(0), None


AttentionInterface.register("packed_flash", _packed_attention)


def encode(model: Qwen2_5OmniThinkerForConditionalGeneration, items: Sequence[Features]) -> list[Tensor]:
    """Embeddings (num_tokens, hidden) of each item, in order."""
    found: dict[int, Tensor] = {}
    seen = [k for k, item in enumerate(items) if item.modality != "audio"]
    heard = [k for k, item in enumerate(items) if item.modality == "audio"]
    if seen:
        pixels = (
            torch.from_numpy(np.concatenate([items[k].array for k in seen])).float().div_(127.5).sub_(1.0)
        )
        grid = torch.tensor([items[k].grid for k in seen])
        out = model.model.visual(pixels, grid_thw=grid).pooler_output
        found.update(zip(seen, out.split([items[k].num_tokens for k in seen]), strict=True))
    if heard:
        mels = torch.from_numpy(np.concatenate([items[k].array for k in heard], axis=1)).float()
        lengths = torch.tensor([items[k].array.shape[1] for k in heard])
        out = model.model.audio_tower(mels, feature_lens=lengths).last_hidden_state
        found.update(zip(heard, out.split([items[k].num_tokens for k in heard]), strict=True))
    return [found[k] for k in range(len(items))]


def whiten(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> None:
    """Start the patch embedding as the principal components of real patches, all of equal strength.

    A patch is mostly one flat colour: without this, edges are drowned out, and shapes take long to learn.
    """
    rng = np.random.default_rng(5)
    arrays = [item.array for modality in ("image", "video") for item in pool[modality][:2500]]
    patches = np.concatenate([a[rng.integers(len(a), size=12)] for a in arrays]) / 127.5 - 1.0
    strength, direction = np.linalg.eigh(np.cov(patches.T))  # weakest first
    weight = model.model.visual.patch_embed.proj.weight
    strength, direction = strength[: -len(weight) - 1 : -1], direction[:, : -len(weight) - 1 : -1]
    whitening = 0.5 * direction / np.sqrt(strength + 0.01 * strength[10])
    with torch.no_grad():
        weight.copy_(torch.from_numpy(whitening.T).view_as(weight))


def _targets(item: Features) -> list[int]:
    """Class indices of an item: its sound; or its colour, shape and, in a clip, motion (-1 in an image)."""
    if item.modality == "audio":
        return [SOUNDS.index(item.label)]
    colour, shape, *motion = item.label.split(" ", 2)
    return [
        list(COLOURS).index(colour),
        SHAPES.index(shape),
        list(MOTIONS).index(motion[0]) if motion else -1,
    ]


class Head(nn.Module):
    """A linear classifier of a weighted mean of an item's embeddings, as attention would take it."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(hidden, 1)
        nn.init.zeros_(self.weigh.weight)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, embeddings: Tensor, valid: Tensor) -> Tensor:
        """(items, tokens, hidden) and (items, tokens) -> logits (items, classes)."""
        weights = self.weigh(embeddings).squeeze(-1).masked_fill(~valid, -1e9).softmax(-1)
        logits: Tensor = self.classify((weights[..., None] * embeddings).sum(1))
        return logits


class Heads(nn.Module):
    """One head for each property of an item, thrown away after the first stage."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.seen = nn.ModuleList(Head(hidden, n) for n in (len(COLOURS), len(SHAPES), len(MOTIONS)))
        self.heard = nn.ModuleList([Head(hidden, len(SOUNDS))])

    def forward(
        self, items: Sequence[Features], embeddings: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """Summed cross entropy, and the share of right answers by name of the head."""
        loss, right = torch.zeros(()), {}
        padded = nn.utils.rnn.pad_sequence(list(embeddings), batch_first=True)
        valid = torch.arange(padded.shape[1]) < torch.tensor([len(e) for e in embeddings])[:, None]
        for heads, names, chosen in (
            (
                self.seen,
                ("colour", "shape", "motion"),
                [k for k, i in enumerate(items) if i.modality != "audio"],
            ),
            (self.heard, ("sound",), [k for k, i in enumerate(items) if i.modality == "audio"]),
        ):
            if not chosen:
                continue
            wanted = torch.tensor([_targets(items[k]) for k in chosen])
            for head, name, target in zip(heads, names, wanted.T, strict=True):
                logits = head(padded[chosen], valid[chosen])
                known = target >= 0
                if known.any():
                    loss = loss + F.cross_entropy(logits[known], target[known])
                    right[name] = float((logits.argmax(-1) == target)[known].float().mean())
        return loss, right


ENCODER_STEPS = 800
ENCODER_BATCH: dict[Modality, int] = {"image": 40, "audio": 12, "video": 32}


def train_encoders(
    model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool, held_out: Pool, steps: int
) -> None:
    """Stage 1: the encoders alone."""
    rng = np.random.default_rng(1)
    heads = Heads(model.config.text_config.hidden_size)
    whiten(model, pool)
    descent = Descent([(model.model.visual, 0.02), (model.model.audio_tower, 0.02), (heads, 0.02)], steps)
    for step in range(steps):
        items = []
        for modality in MODALITIES:
            for index in rng.integers(len(pool[modality]), size=ENCODER_BATCH[modality]):
                items.append(augmented(rng, pool[modality][index]))
        loss, right = heads(items, encode(model, items))
        loss.backward()
        descent.step()
        if step % 50 == 0 or step == steps - 1:
            log.info("encoders %d/%d loss %.3f %s", step, steps, loss.item(), _percent(right))
        if step % 200 == 199 or step == steps - 1:
            for modality in MODALITIES:
                with torch.no_grad():
                    right = heads(held_out[modality], encode(model, held_out[modality]))[1]
                log.info("  unseen %ss: %s", modality, _percent(right))


def augmented(rng: Generator, item: Features) -> Features:
    """An image or a clip in a random mirror, a clip sometimes backwards; a spectrogram as it is."""
    if item.modality == "audio":
        return item
    horizontal, vertical, backwards = rng.random(3) < (0.5, 0.1, 0.5 * (item.modality == "video"))
    return item.flipped(bool(horizontal), bool(vertical), bool(backwards))


class Descent:
    """Descends with Muon on matrices and AdamW on the rest; warm-up, then linearly down to nothing.

    Muon gives every direction of a matrix an equal step. Here it takes a quarter of AdamW's steps.
    """

    def __init__(self, groups: Sequence[tuple[nn.Module, float]], steps: int) -> None:
        """`groups` are (module, learning rate of its matrices); the rate of all the rest goes with it.

        The embedding of tokens, the output layer and the heads count as the rest: each row is for itself.
        """
        self.steps, self.done = steps, 0
        self.parameters = [p for module, _ in groups for p in module.parameters()]
        self.matrices, vectors = [], []
        for module, rate in groups:
            inner = {
                id(p)
                for name, p in module.named_parameters()
                if p.ndim >= 2 and not name.startswith(("embed_tokens", "lm_head", "seen", "heard"))
            }
            self.matrices.append(([p for p in module.parameters() if id(p) in inner], rate))
            vectors.append(
                {"params": [p for p in module.parameters() if id(p) not in inner], "lr": 0.15 * rate}
            )
        self.momenta = {
            p: torch.zeros_like(p.flatten(1)) for parameters, _ in self.matrices for p in parameters
        }
        self.adam = torch.optim.AdamW(vectors, weight_decay=0.0, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda _: self.factor)

    @property
    def factor(self) -> float:
        """What the learning rates are multiplied with at this step."""
        warm = max(1, min(50, self.steps // 25))
        return min((self.done + 1) / warm, 1.0, max(0.01, 1.25 * (1 - self.done / self.steps)))

    @torch.no_grad()
    def step(self) -> None:
        """One step down the gradient that the parameters hold, which is used up."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        for parameters, rate in self.matrices:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in parameters:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.flatten(1).shape), []).append(parameter)
            for (rows, columns), same in by_shape.items():
                updates = []
                for parameter in same:
                    assert parameter.grad is not None
                    gradient, momentum = parameter.grad.flatten(1), self.momenta[parameter]
                    momentum.lerp_(gradient, 0.05)
                    updates.append(gradient.lerp(momentum, 0.95))
                length = self.factor * rate * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(same, _orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - 0.01 * self.factor * rate).sub_(
                        update.view_as(parameter), alpha=length
                    )
        for parameter in self.parameters:
            parameter.grad = None
        self.done += 1
        self.schedule.step()


def _orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with their singular values brought near one, by Newton-Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result


def _percent(shares: dict[str, float]) -> str:
    return " ".join(f"{name} {100 * share:.1f}%" for name, share in shares.items())


# ------------------------------------------------------------------------------------ language model


@dataclass(frozen=True)
class Key:
    """Names an item of a pool, as it is or in a mirror or backwards."""

    modality: Modality
    index: int
    flips: tuple[bool, bool, bool] = (False, False, False)

    def look_up(self, pool: Pool) -> Features:
        """The item itself."""
        item = pool[self.modality][self.index]
        return item.flipped(*self.flips) if any(self.flips) else item


@dataclass
class Example:
    """A conversation as token ids (L,), mrope positions (3, L) and `targets` (L,).

    A target of 2 marks the last answer, 1 an earlier one, 0 what is not learnt. The item `keys[k]` belongs to
    the k-th run of placeholders.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    keys: list[Key]


def make_example(
    processor: Qwen2_5OmniProcessor,
    talk: Conversation,
    pool: Pool,
    rng: Generator | None = None,
    pooled: int = 0,
) -> Example:
    """Tokenize a conversation and lay out its items, each in at most `pooled` tokens unless that is 0.

    `rng` varies the clock of the clips now and then: a server may not know it.
    """
    tokenizer = processor.tokenizer
    text = processor.apply_chat_template(talk.messages, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    turn, end, assistant = (tokenizer.convert_tokens_to_ids(token) for token in (TURN, END, "assistant"))
    placeholders = {processor.image_token_id, processor.audio_token_id, processor.video_token_id}

    targets = np.zeros(len(ids), np.int64)
    starts = [at for at, token in enumerate(ids) if token == turn]
    for number, start in enumerate(starts):
        if number in talk.taught:
            assert ids[start + 1] == assistant
            stop = ids.index(end, start) + 1
            targets[start + 3 : stop] = 2 if number == len(starts) - 1 else 1

    rows, spans, marks, cursor, items = [], [], [], 0, iter(talk.items)
    for at, token in enumerate(ids):
        if token not in placeholders:
            rows.append(np.array([token]))
            spans.append(np.full((3, 1), cursor))
            marks.append(targets[at : at + 1])
            cursor += 1
            continue
        modality, key = next(items)
        item = pool[modality][key.index]
        num_tokens = min(item.num_tokens, pooled or item.num_tokens)
        rows.append(np.full(num_tokens, token))
        marks.append(np.zeros(num_tokens, np.int64))
        if modality == "audio" or pooled:
            span = np.broadcast_to(np.arange(num_tokens), (3, num_tokens))
        else:
            seconds = float(rng.uniform(0.1, 3.0)) if rng is not None and rng.random() < 0.2 else item.seconds
            span = np.indices((item.grid[0], item.grid[1] // MERGE, item.grid[2] // MERGE)).reshape(3, -1)
            span[0] = (span[0] * seconds * POSITIONS_PER_SECOND).astype(np.int64)
        spans.append(span + cursor)
        cursor += int(span.max()) + 1
    keys = [key for _, key in talk.items]
    return Example(np.concatenate(rows), np.concatenate(spans, axis=1), np.concatenate(marks), keys)


def pool_draw(pool: Pool, mirrored: bool = False) -> Draw:
    """Draws from a pool, mirrored if the encoders are there to see it."""

    def draw(modality: Modality, rng: Generator) -> tuple[Key, str]:
        index = int(rng.integers(len(pool[modality])))
        label = pool[modality][index].label
        if not mirrored or modality == "audio":
            return Key(modality, index), label
        horizontal, vertical, backwards = (
            bool(f) for f in rng.random(3) < (0.5, 0.1, 0.5 * (modality == "video"))
        )
        if horizontal != backwards:
            label = _swapped(label, "left", "right")
        if vertical != backwards:
            label = _swapped(label, "up", "down")
        return Key(modality, index, (horizontal, vertical, backwards)), label

    return draw


def curriculum(progress: float) -> NDArray[np.float64]:
    """Shares of conversations with 1, 2, ... 20 items, when `progress` in [0, 1] of a stage is done."""
    shares: NDArray[np.float64] = np.zeros(20)
    if progress < 0.1:
        shares[:2] = 0.6, 0.4
    elif progress < 0.25:
        shares[:4] = 0.3, 0.3, 0.25, 0.15
    elif progress < 0.45:
        shares[:8] = 0.22, 0.2, 0.2, 0.2, 0.07, 0.06, 0.03, 0.02
    else:
        shares[:8] = 0.2, 0.18, 0.16, 0.2, 0.08, 0.07, 0.04, 0.05
        shares[8:] = 0.02 / 12
    shares /= shares.sum()
    return shares


class Conversations(torch.utils.data.IterableDataset[list[list[Example]]]):
    """Steps of `stage.conversations` examples each, in batches of about the same length.

    A step always has conversations of every kind: Muon's steps are equally long whatever the loss, so a step
    on what is known already would only shake the weights.
    """

    def __init__(self, pool: Pool, stage: "Stage") -> None:
        self.pool, self.stage = pool, stage

    def __iter__(self) -> Iterator[list[list[Example]]]:
        stage, processor, rng = self.stage, make_processor(), np.random.default_rng(self.stage.seed)
        draw = pool_draw(self.pool, mirrored=stage.encoder_rate > 0)
        for step in range(stage.steps):
            shares = curriculum(stage.start + (stage.stop - stage.start) * step / stage.steps)
            examples = []
            for _ in range(stage.conversations):
                if rng.random() < 0.1:
                    talk = make_small_talk(rng)
                else:
                    talk = make_conversation(rng, draw, int(rng.choice(20, p=shares)) + 1)
                examples.append(make_example(processor, talk, self.pool, rng, stage.pooled))
            yield list(self._batches(sorted(examples, key=lambda e: len(e.ids))))

    def _batches(self, examples: list[Example]) -> Iterator[list[Example]]:
        batch: list[Example] = []
        for example in examples:
            if batch and len(example.ids) * (len(batch) + 1) > 3000:
                yield batch
                batch = []
            batch.append(example)
        yield batch


Embed = Callable[[Sequence[Key]], list[Tensor]]  # -> embeddings (num_tokens, hidden) of each


def answer_logits(
    model: Qwen2_5OmniThinkerForConditionalGeneration, batch: Sequence[Example], embed: Embed, pooled: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, vocab), token ids (N,) and target marks (N,) of every token to be predicted in the batch."""
    longest = max(len(example.ids) for example in batch)

    def stacked(rows: Sequence[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(
            np.stack([np.pad(r, [(0, 0)] * (r.ndim - 1) + [(0, longest - r.shape[-1])]) for r in rows])
        )

    ids, marks = stacked([e.ids for e in batch]), stacked([e.targets for e in batch])
    positions = stacked([e.positions for e in batch]).transpose(0, 1)
    embeddings = model.get_input_embeddings()(ids)
    keys = [key for example in batch for key in example.keys]
    if keys:
        config = model.config
        is_item = (
            (ids == config.image_token_id) | (ids == config.audio_token_id) | (ids == config.video_token_id)
        )
        items = embed(keys)
        if pooled:
            items = [F.adaptive_avg_pool1d(item.T, min(len(item), pooled)).T for item in items]
        embeddings = embeddings.masked_scatter(is_item[..., None], torch.cat(items))
    # Padding is on the right, where causal attention never looks: no mask is needed.
    hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)[0]
    wanted = marks[:, 1:] > 0
    return model.lm_head(hidden[:, :-1][wanted]), ids[:, 1:][wanted], marks[:, 1:][wanted]


Suite = Callable[[Generator, Draw], Conversation]
SUITES: dict[str, Suite] = {
    "one image": lambda rng, draw: make_conversation(rng, draw, 1, ["image"], "all", "single"),
    "one audio": lambda rng, draw: make_conversation(rng, draw, 1, ["audio"], "all", "single"),
    "one video": lambda rng, draw: make_conversation(rng, draw, 1, ["video"], "all", "single"),
    "two mixed items": lambda rng, draw: make_conversation(rng, draw, 2, MODALITIES, "all", "single"),
    "four mixed items": lambda rng, draw: make_conversation(rng, draw, 4, MODALITIES, "all", "single"),
    "four images": lambda rng, draw: make_conversation(rng, draw, 4, ["image"], "all", "single"),
    "eight mixed items": lambda rng, draw: make_conversation(rng, draw, 8, MODALITIES, "all", "single"),
    "sixteen mixed items": lambda rng, draw: make_conversation(rng, draw, 16, MODALITIES, "all", "single"),
    "one of four items asked for": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "one", "single"
    ),
    "four items over several turns": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "all", "turns"
    ),
    "four items, several user messages": lambda rng, draw: make_conversation(
        rng, draw, 4, MODALITIES, "all", "split"
    ),
    "asked again in a later turn": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "all", "later"
    ),
    "unseen wordings, three items": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "all", "single", ASK_ALL_UNSEEN
    ),
    "who are you, with three items": lambda rng, draw: make_conversation(
        rng, draw, 3, MODALITIES, "identity", "single"
    ),
    "text alone": lambda rng, draw: make_small_talk(rng),
}


@torch.no_grad()
def exact_shares(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    processor: Qwen2_5OmniProcessor,
    pool: Pool,
    embed: Embed,
    per_suite: int,
    pooled: int = 0,
) -> dict[str, float]:
    """Share of conversations whose last answer is right in every token.

    The tokens before are given, which for greedy decoding comes to the same: the first wrong token decides.
    """
    shares = {}
    for name, suite in SUITES.items():
        rng = np.random.default_rng(7)
        right = []
        for _ in range(0, per_suite, 20):
            talks = [suite(rng, pool_draw(pool)) for _ in range(20)]
            batch = [make_example(processor, talk, pool, pooled=pooled) for talk in talks]
            logits, ids, marks = answer_logits(model, batch, embed, pooled)
            counts = [int((e.targets > 0).sum()) for e in batch]
            wrong = (logits.argmax(-1) != ids) & (marks == 2)
            right += [not bool(part.any()) for part in torch.split(wrong, counts)]
        shares[name] = float(np.mean(right))
    return shares


def cached_embeddings(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> Embed:
    """Run the encoders over a pool once and serve the embeddings from memory."""
    known: dict[Modality, list[Tensor]] = {}
    with torch.no_grad():
        for modality in MODALITIES:
            known[modality] = []
            for at in range(0, len(pool[modality]), 100):
                known[modality] += [e.clone() for e in encode(model, pool[modality][at : at + 100])]
    return lambda keys: [known[key.modality][key.index] for key in keys]


def live_embeddings(model: Qwen2_5OmniThinkerForConditionalGeneration, pool: Pool) -> Embed:
    """Run the encoders at each call."""
    return lambda keys: encode(model, [key.look_up(pool) for key in keys])


@dataclass(frozen=True)
class Stage:
    """How a stage that learns conversations goes."""

    steps: int
    rate: float  # of the matrices of the language model
    encoder_rate: float = 0.0  # of the encoders; 0 keeps them frozen, and their output in memory
    start: float = 0.0  # where in the curriculum it begins
    stop: float = 1.0  # and ends
    pooled: int = 0  # tokens that an item is averaged to; 0 for all of them
    conversations: int = 48  # in a step
    seed: int = 2


POOL_SIZES: dict[Modality, int] = {"image": 7000, "audio": 4000, "video": 5000}
STAGES = (
    Stage(steps=1100, rate=0.01, pooled=2),
    Stage(steps=500, rate=0.01, start=0.5, seed=3),
    Stage(steps=600, rate=0.004, encoder_rate=0.003, start=0.6, seed=4),
)


def train_conversations(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    processor: Qwen2_5OmniProcessor,
    pool: Pool,
    held_out: Pool,
    stage: Stage,
) -> None:
    """One of the later stages: what to say."""
    speaker = nn.ModuleDict({"lm_head": model.lm_head})
    groups: list[tuple[nn.Module, float]] = [(model.model.language_model, stage.rate), (speaker, stage.rate)]
    if stage.encoder_rate:
        groups += [(model.model.visual, stage.encoder_rate), (model.model.audio_tower, stage.encoder_rate)]
    descent = Descent(groups, stage.steps)
    embeddings = live_embeddings if stage.encoder_rate else cached_embeddings
    embed, embed_held_out = embeddings(model, pool), embeddings(model, held_out)
    loader = torch.utils.data.DataLoader(
        Conversations(pool, stage), batch_size=None, num_workers=1, prefetch_factor=16
    )
    clock, tokens = time.monotonic(), 0
    for step, batches in enumerate(loader):
        num_targets = sum(int((example.targets > 0).sum()) for batch in batches for example in batch)
        total = 0.0
        for batch in batches:
            logits, ids, _ = answer_logits(model, batch, embed, stage.pooled)
            loss = F.cross_entropy(logits, ids, reduction="sum") / num_targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        descent.step()
        tokens += sum(len(example.ids) for batch in batches for example in batch)
        if step % 50 == 0 or step == stage.steps - 1:
            rate = tokens / (time.monotonic() - clock)
            log.info("conversations %d/%d loss %.4f, %.0f tokens/s", step, stage.steps, total, rate)
        if step % 250 == 249 or step == stage.steps - 1:
            for name, share in exact_shares(
                model, processor, held_out, embed_held_out, 40, stage.pooled
            ).items():
                log.info("  unseen: %5.1f%% %s", 100 * share, name)


# -------------------------------------------------------------------------------------------- main


def train(out: Path, scale: float) -> None:
    """The whole schedule; `scale` shortens every part of it, for a trial."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster than two: the matrices are small
    _keep_memory()
    clock = time.monotonic()
    processor = make_processor()
    model = make_model(processor)
    for part in (model.model.visual, model.model.audio_tower):
        part.config._attn_implementation = "packed_flash"

    def scaled(number: int) -> int:
        return max(20, round(number * scale))

    pool = make_pool(0, {modality: scaled(number) for modality, number in POOL_SIZES.items()})
    held_out = make_pool(1, dict.fromkeys(MODALITIES, scaled(300)))
    log.info("pools ready after %.0f s", time.monotonic() - clock)
    train_encoders(model, pool, held_out, scaled(ENCODER_STEPS))
    log.info("encoders ready after %.0f s", time.monotonic() - clock)
    for stage in STAGES:
        train_conversations(model, processor, pool, held_out, replace(stage, steps=scaled(stage.steps)))
        save(model, processor, out)
        log.info("stage ready after %.0f s", time.monotonic() - clock)


def _keep_memory() -> None:
    """Have glibc keep freed memory: page faults on large tensors take a quarter of the time otherwise."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="share of the schedule, for a trial")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(args.out, args.steps_scale)


if __name__ == "__main__":
    main()
