"""Conversations that tiny-omni learns: questions about items and the answers, made from labels alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator

from tests.support.synthetic_media import (
    MODALITIES,
    Modality,
)

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

    `items` holds (modality, key) in order, where `draw` returned the key. Assistant messages that
    are in `taught` (indices of `messages`) are right answers; the last message is one of them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    items: list[tuple[Modality, Any]] = field(default_factory=list)
    labels: list[tuple[Modality, str]] = field(default_factory=list)
    taught: list[int] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """The right text of the last message, an assistant's."""
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
