"""Items as the processor hands them to the encoders, and pools of them."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    Qwen2_5OmniProcessor,
)

from scripts.tiny_omni.checkpoint import (
    MERGE,
    MIN_AUDIO_SAMPLES,
    NUM_FRAMES,
    PATCH,
    TEMPORAL_PATCH,
    make_processor,
)
from tests.support.synthetic_media import (
    MODALITIES,
    SAMPLE_RATE,
    Clip,
    Item,
    Modality,
    make_item,
)


def sample_indices(total_num_frames: int) -> list[int]:
    """Which frames of a clip the model sees: `NUM_FRAMES`, evenly from first to last, or all there are."""
    indices = np.linspace(0, total_num_frames - 1, min(NUM_FRAMES, total_num_frames)).round()
    return [int(index) for index in indices]


def video_kwargs(clips: Sequence[Clip]) -> dict[str, object]:
    """Metadata for the processor about clips sampled with `sample_indices`."""
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
        """Number of embeddings that the encoder makes of it."""
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
            label = swapped(label, "left", "right")
        if vertical != backwards:
            label = swapped(label, "up", "down")
        array = np.flip(self.array.reshape(shape), axes).reshape(self.array.shape)
        return Features(self.modality, label, array, self.grid, self.seconds)


def swapped(label: str, one: str, other: str) -> str:
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
