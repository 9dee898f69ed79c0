"""The check at start: only what comes out exactly as the processor makes it is served.

*Exact* means: items that are processed separately and then joined equal, bit for bit, what one call of the
processor returns for the whole conversation. The check needs no knowledge of the family:

1. For each modality, these candidates are tried in order, and the first that is exact wins.
   a. Each item in a call of its own. The model's stage normalizes, so that pixels travel as bytes.
   b. Each item in a call of its own.
   c. All items of a request in one call.
   If none is exact, the modality is left out.
2. While a request with items of all remaining modalities is not exact, the last modality is left out.

The log names each modality that is left out, and the difference.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from deployments.processor.arguments import DecodedItem
from deployments.processor.chat_encoder import ChatEncoder
from deployments.processor.checkpoint import prompting_of
from deployments.processor.item_processor import Handling, ItemProcessor
from deployments.processor.joining import join
from deployments.processor.processed_item import ProcessedItem
from deployments.types import Arrays, Chat, Media, Modality, VideoMetadata

logger = logging.getLogger("ray.serve")


class NotExact(Exception):
    """Says what differs from the processor's own result."""


def only_what_is_exact(items: ItemProcessor) -> ItemProcessor:
    """Returns the processor for the modalities that it can serve exactly, with the handling found for each.

    Raises ValueError, with the family's name, if a model that takes media is left with no modality.
    """
    if not items.handlings:
        return items
    trial = _Trial(items)
    handlings: dict[Modality, Handling] = {}
    left_out: dict[Modality, str] = {}
    with _one_thread():
        for modality in items.handlings:
            try:
                handlings[modality] = _first_exact(trial, modality)
            except NotExact as error:
                left_out[modality] = str(error)
        while len(handlings) > 1:
            try:
                trial.check(_mixed(list(handlings)), handlings)
                break
            except NotExact as error:
                last, _ = handlings.popitem()
                left_out[last] = f"in one request with other modalities, {error}"
    messages = {
        modality: f"{items.family}: {modality} input does not come out as the processor makes it: {why}"
        for modality, why in left_out.items()
    }
    if not handlings:
        raise ValueError("; ".join(messages.values()))
    for modality, message in messages.items():
        logger.warning("%s; requests with %s will be refused", message, modality)
    return items.handling(handlings)


def _first_exact(trial: _Trial, modality: Modality) -> Handling:
    """Raises NotExact with the difference of the last candidate."""
    *others, last = _CANDIDATES
    for candidate in others:
        try:
            return trial.try_out(candidate, modality)
        except NotExact:
            continue
    return trial.try_out(last, modality)


def _as_bytes(items: ItemProcessor, modality: Modality) -> Handling:
    if modality is Modality.AUDIO:
        raise NotExact("sounds are not made of bytes")
    normalizations = items.find_normalizations(_with_every_byte(modality))
    if not normalizations:
        raise NotExact("the normalization cannot be deferred")
    return Handling(normalizations=normalizations)


def _separately(items: ItemProcessor, modality: Modality) -> Handling:
    return Handling()


def _jointly(items: ItemProcessor, modality: Modality) -> Handling:
    return Handling(jointly=True)


Candidate = Callable[[ItemProcessor, Modality], Handling]
_CANDIDATES: list[Candidate] = [_as_bytes, _separately, _jointly]


@contextmanager
def _one_thread() -> Iterator[None]:
    """With several threads, torch rounds differently when sizes change."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _not_exact_on_error() -> Iterator[None]:
    """Turns every error into NotExact.

    This is the border to processors and templates of all families, which may raise anything. A candidate that
    raises is not exact, and must not keep the server from starting with another one.
    """
    try:
        yield
    except NotExact:
        raise
    except Exception as error:
        raise NotExact(f"{type(error).__name__}: {error}") from error


class _Trial:
    """Compares both ways for samples of one processor, which it does not change."""

    def __init__(self, items: ItemProcessor) -> None:
        self._items = items
        # A copy, because an encoder makes some of the tokenizer's tokens special.
        self._encoder = ChatEncoder(prompting_of(copy.deepcopy(items.processor)))

    def try_out(self, candidate: Candidate, modality: Modality) -> Handling:
        """Returns the handling that the candidate proposes. Raises NotExact if it is not exact."""
        with _not_exact_on_error():
            handling = candidate(self._items, modality)
        self.check(_samples(modality), {modality: handling})
        return handling

    def check(self, samples: Sequence[DecodedItem], handlings: Mapping[Modality, Handling]) -> None:
        """Raises NotExact unless the first sample alone, and all samples together, are exact."""
        items = self._items.handling(handlings)
        for some in (samples[:1], samples):
            with _not_exact_on_error():
                _compare(self._separately(items, some), self._in_one_call(some))

    def _separately(self, items: ItemProcessor, samples: Sequence[DecodedItem]) -> Arrays:
        modalities = [media.modality for media, _ in samples]
        done: dict[int, ProcessedItem] = {}
        for modality in set(modalities):
            places = [i for i, each in enumerate(modalities) if each == modality]
            groups = [places] if modality in items.joint else [[place] for place in places]
            for group in groups:
                processed = items.process([samples[place] for place in group])
                done |= zip(group, processed, strict=True)
        in_order = [done[place] for place in range(len(samples))]
        chat = Chat(_conversation([{"type": str(modality)} for modality in modalities]))
        prompt = self._encoder.encode(chat, [each.affixes for each in in_order])
        return join(prompt, [(each.record(None), each.features) for each in in_order])

    def _in_one_call(self, samples: Sequence[DecodedItem]) -> Arrays:
        """With media in the form in which users of the processor pass them."""
        processor = self._items.processor
        kwargs: dict[str, object] = {"return_tensors": "pt"}
        if metadata := [media.video_metadata for media, _ in samples if media.video_metadata]:
            kwargs |= {"video_metadata": [metadata], "do_sample_frames": False}
            if "video_second_per_grid" in processor.model_input_names:
                kwargs["fps"] = _SAMPLED_FPS
        answer = processor.apply_chat_template(
            [self._encoder.adapted(each) for each in _conversation([_as_part(*item) for item in samples])],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            processor_kwargs=kwargs,
        )
        return {name: np.asarray(value) for name, value in answer.items()}


def _compare(ours: Arrays, theirs: Arrays) -> None:
    """Raises NotExact with the names of the features that differ."""
    if odd := ours.keys() ^ theirs.keys():
        raise NotExact(f"{', '.join(sorted(odd))} only on one side")
    for name, array in theirs.items():
        if ours[name].dtype != array.dtype or not np.array_equal(ours[name], array):
            raise NotExact(f"{name} differs")


def _conversation(parts: list[dict[str, object]]) -> list[dict[str, object]]:
    """Spaces and line breaks around the items reveal affixes that merge with the text next to them."""
    first, *others = parts
    around = [{"type": "text", "text": text} for text in (" what is \n", " this ?")]
    return [
        {"role": "user", "content": [around[0], first, around[1]]},
        {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
        {"role": "user", "content": [*others, around[1]]},
    ]


def _as_part(media: Media, arrays: Arrays) -> dict[str, object]:
    from PIL import Image

    (array,) = arrays.values()
    content = Image.fromarray(array) if media.modality == Modality.IMAGE else array
    return {"type": str(media.modality), str(media.modality): content}


_IMAGE_SIZES = ((96, 128), (208, 80), (128, 96))  # height, width
_AUDIO_SAMPLES = (16000, 25600, 11200)
_NUM_FRAMES = 4
_SAMPLED_FPS = 2.0
_GRADIENT_WIDTH = 530  # pixels


def _samples(modality: Modality) -> list[DecodedItem]:
    return [_sample(modality, i) for i in range(3)]


def _mixed(modalities: list[Modality]) -> list[DecodedItem]:
    return [_sample(modality, i) for i in range(2) for modality in modalities]


def _sample(modality: Modality, i: int) -> DecodedItem:
    """The i-th small sample of a modality: noise, each in a different size."""
    random = np.random.default_rng(i)
    name = f"sample {i}"
    if modality is Modality.AUDIO:
        samples = random.uniform(-1, 1, _AUDIO_SAMPLES[i]).astype(np.float32)
        return Media(modality, name), {"samples": samples}
    frames = random.integers(0, 256, (_NUM_FRAMES, *_IMAGE_SIZES[i], 3), np.uint8)
    return _image_or_video(modality, name, frames)


def _with_every_byte(modality: Modality) -> DecodedItem:
    """A grey gradient with all 256 bytes, so gentle that it keeps them at half of its size.

    Its width is no multiple of a usual patch size, so the processor has to resize it. That shows whether it
    resizes bytes or normalized values.
    """
    gradient = (np.arange(_GRADIENT_WIDTH) * 256 // _GRADIENT_WIDTH).astype(np.uint8)
    return _image_or_video(
        modality, "gradient", np.broadcast_to(gradient[:, None], (_NUM_FRAMES, 16, _GRADIENT_WIDTH, 3))
    )


def _image_or_video(modality: Modality, name: str, frames: npt.NDArray[np.uint8]) -> DecodedItem:
    """`frames`: [_NUM_FRAMES, H, W, 3]. An image is the first of them."""
    if modality is Modality.IMAGE:
        return Media(modality, name), {"pixels": frames[0]}
    metadata: VideoMetadata = {
        "total_num_frames": 5 * _NUM_FRAMES,
        "frames_indices": list(range(0, 5 * _NUM_FRAMES, 5)),
        "fps": 5 * _SAMPLED_FPS,
        "duration": _NUM_FRAMES / _SAMPLED_FPS,
    }
    return Media(modality, name, video_metadata=metadata), {"frames": frames}
