"""A trial at start: items processed apart and joined must be what one call of the processor makes of all.

It needs no knowledge of the family. What does not come out bit for bit is not served, and the log says why.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.processor.chat_encoder import ChatEncoder
from deployments.processor.checkpoint import prompting_of
from deployments.processor.item_processor import ItemProcessor, Processed
from deployments.processor.joining import join
from deployments.types import Arrays, Chat, Media, Modality, VideoMetadata

logger = logging.getLogger("ray.serve")

Item = tuple[Media, Arrays]


def only_what_is_exact(items: ItemProcessor) -> ItemProcessor:
    """The same, without the modalities that cannot be processed item by item.

    Raises ValueError, with the family's name, where a model with media is left with none.
    """
    if not items.placeholders:
        return items
    with _one_thread():
        trial = _Trial(items)
        for modality in list(items.placeholders):
            samples = _samples(modality)
            if modality is not Modality.AUDIO:
                # The border to processors of all families, as below: one that can not do it goes without.
                with suppress(Exception):
                    items.learn_normalization(_with_every_byte(modality))
                if not trial.differs(samples):
                    continue
                items.forget_normalization(modality)
            if trial.differs(samples):
                items.together |= {modality}
                if why := trial.differs(samples):
                    items.together -= {modality}
                    _leave_out(items, modality, why)
        while len(items.placeholders) > 1 and (why := trial.differs(_mixed(list(items.placeholders)))):
            _leave_out(items, list(items.placeholders)[-1], f"together with the others, {why}")
    return items


@contextmanager
def _one_thread() -> Iterator[None]:
    """With several threads, torch does not give the same last bit every time the sizes change."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _leave_out(items: ItemProcessor, modality: Modality, why: str) -> None:
    message = f"{items.family}: {modality} input does not come out as the processor makes it: {why}"
    del items.placeholders[modality]
    if not items.placeholders:
        raise ValueError(message)
    logger.warning("%s; requests with %s will be refused", message, modality)


class _Trial:
    def __init__(self, items: ItemProcessor) -> None:
        self._items = items
        # A copy: an encoder makes some of the tokenizer's tokens special.
        self._encoder = ChatEncoder(prompting_of(copy.deepcopy(items.processor)))

    def differs(self, samples: Sequence[Item]) -> str | None:
        """What differs, in words; None where all is equal, for one sample alone and for all together."""
        for some in (samples[:1], samples):
            try:
                ours, theirs = self._apart(some), self._jointly(some)
            # The border to templates and processors of all families: whatever they raise here is a no.
            except Exception as error:  # noqa: BLE001
                return f"{type(error).__name__}: {error}"
            if odd := ours.keys() ^ theirs.keys():
                return f"{', '.join(sorted(odd))} only on one side"
            for name, array in theirs.items():
                if ours[name].dtype != array.dtype or not np.array_equal(ours[name], array):
                    return f"{name} differs"
        return None

    def _apart(self, samples: Sequence[Item]) -> Arrays:
        modalities = [media.modality for media, _ in samples]
        done: list[Processed | None] = [None] * len(samples)
        for modality in set(modalities):
            places = [i for i, each in enumerate(modalities) if each == modality]
            groups = [places] if modality in self._items.together else [[place] for place in places]
            for group in groups:
                processed = self._items.process([samples[place] for place in group])
                for place, each in zip(group, processed, strict=True):
                    done[place] = each
        all_done = [each for each in done if each]
        chat = Chat(_conversation([{"type": str(modality)} for modality in modalities]))
        prompt = self._encoder.encode(chat, [each.affixes for each in all_done])
        return join(prompt, [(each.record(None), each.features) for each in all_done])

    def _jointly(self, samples: Sequence[Item]) -> Arrays:
        """With media as users of the processor pass them."""
        processor = self._items.processor
        kwargs: dict[str, Any] = {"return_tensors": "pt"}
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


def _conversation(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blanks and line breaks around the items show whether text and items grow together."""
    first, *others = parts
    around = [{"type": "text", "text": text} for text in (" what is \n", " this ?")]
    return [
        {"role": "user", "content": [around[0], first, around[1]]},
        {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
        {"role": "user", "content": [*others, around[1]]},
    ]


def _as_part(media: Media, arrays: Arrays) -> dict[str, Any]:
    from PIL import Image

    (array,) = arrays.values()
    content = Image.fromarray(array) if media.modality == Modality.IMAGE else array
    return {"type": str(media.modality), str(media.modality): content}


_IMAGE_SIZES = ((96, 128), (208, 80), (128, 96))  # height, width
_AUDIO_SAMPLES = (16000, 25600, 11200)
_NUM_FRAMES = 4
_SAMPLED_FPS = 2.0
_SLOPE = 530  # pixels


def _samples(modality: Modality) -> list[Item]:
    return [_sample(modality, i) for i in range(3)]


def _mixed(modalities: list[Modality]) -> list[Item]:
    return [_sample(modality, i) for i in range(2) for modality in modalities]


def _sample(modality: Modality, i: int) -> Item:
    """The i-th small sample of a modality: noise, each of another size."""
    random = np.random.default_rng(i)
    name = f"sample {i}"
    if modality is Modality.AUDIO:
        samples = random.uniform(-1, 1, _AUDIO_SAMPLES[i]).astype(np.float32)
        return Media(modality, name), {"samples": samples}
    frames = random.integers(0, 256, (_NUM_FRAMES, *_IMAGE_SIZES[i], 3), np.uint8)
    return _image_or_video(modality, name, frames)


def _with_every_byte(modality: Modality) -> Item:
    """A slope of grey, so gentle that it has every value at half of its size, too.

    No patches of usual sizes make up its width: it is resized, so that a processor shows whether it does that
    with bytes.
    """
    slope = (np.arange(_SLOPE) * 256 // _SLOPE).astype(np.uint8)
    return _image_or_video(modality, "slope", np.broadcast_to(slope[:, None], (_NUM_FRAMES, 16, _SLOPE, 3)))


def _image_or_video(modality: Modality, name: str, frames: npt.NDArray[np.uint8]) -> Item:
    """`frames`: [_NUM_FRAMES, H, W, 3], of which an image has the first."""
    if modality is Modality.IMAGE:
        return Media(modality, name), {"pixels": frames[0]}
    metadata: VideoMetadata = {
        "total_num_frames": 5 * _NUM_FRAMES,
        "frames_indices": list(range(0, 5 * _NUM_FRAMES, 5)),
        "fps": 5 * _SAMPLED_FPS,
        "duration": _NUM_FRAMES / _SAMPLED_FPS,
    }
    return Media(modality, name, video_metadata=metadata), {"frames": frames}
