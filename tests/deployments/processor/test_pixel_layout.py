"""Images without a layout change give the same values as in transformers, bit for bit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deployments.processor.pixel_layout import channels_first, without_relayout

PROCESSORS = [
    "AriaImageProcessor",
    "CLIPImageProcessor",
    "Gemma3ImageProcessor",
    "Gemma4ImageProcessor",
    "Glm4vImageProcessor",
    "GotOcr2ImageProcessor",
    "Idefics3ImageProcessor",
    "LlavaImageProcessor",
    "LlavaNextImageProcessor",
    "LlavaOnevisionImageProcessor",
    "Ovis2ImageProcessor",
    "Phi4MultimodalImageProcessor",
    "PixtralImageProcessor",
    "Qwen2VLImageProcessor",
    "SiglipImageProcessor",
    "SmolVLMImageProcessor",
]
VIDEO_PROCESSORS = [
    "Gemma4VideoProcessor",
    "Glm4vVideoProcessor",
    "InternVLVideoProcessor",
    "LlavaOnevisionVideoProcessor",
    "Qwen2VLVideoProcessor",
    "Qwen3VLVideoProcessor",
    "SmolVLMVideoProcessor",
]
SIZES = [(900, 700), (37, 53), (224, 224), (336, 448), (30, 2000)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_have_the_same_values(name: str) -> None:
    plain = getattr(transformers, name)()
    kept: Any = without_relayout(SimpleNamespace(image_processor=plain)).image_processor
    for height, width in SIZES:
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        before = pixels.copy()
        pixels.flags.writeable = False
        kwargs = {"images": [pixels], "input_data_format": "channels_last", "return_tensors": "pt"}
        expected, given = plain(**kwargs), kept(**kwargs)
        assert expected.keys() == given.keys()
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(given[key], value), key
            else:
                assert given[key] == value
        assert np.array_equal(pixels, before)
    taken = kept.process_image(pixels, do_convert_rgb=True, input_data_format="channels_last")
    assert np.shares_memory(taken.numpy(), pixels)


@pytest.mark.parametrize("name", VIDEO_PROCESSORS)
@pytest.mark.parametrize(("height", "width"), SIZES[:2])
def test_videos_have_the_same_values(name: str, height: int, width: int) -> None:
    processor = getattr(transformers, name)()
    frames = np.random.default_rng(height).integers(0, 256, (8, height, width, 3), np.uint8)
    before = frames.copy()
    metadata = [{"total_num_frames": 8, "fps": 2.0, "frames_indices": list(range(8)), "duration": 4.0}]
    kwargs = {"video_metadata": metadata, "do_sample_frames": False, "return_tensors": "pt"}
    expected = processor(videos=[frames], input_data_format="channels_last", **kwargs)
    given = processor(videos=[channels_first(frames)], input_data_format="channels_first", **kwargs)
    assert expected.keys() == given.keys()
    for key, value in expected.items():
        assert torch.equal(given[key], value) if isinstance(value, torch.Tensor) else given[key] == value
    assert np.array_equal(frames, before)


def test_other_arrays_are_processed_as_before() -> None:
    plain = transformers.CLIPImageProcessor()
    kept: Any = without_relayout(SimpleNamespace(image_processor=plain)).image_processor
    grey = np.random.default_rng(0).integers(0, 256, (40, 50, 1), np.uint8)
    kwargs = {"images": [grey], "input_data_format": "channels_last", "return_tensors": "pt"}
    assert torch.equal(kept(**kwargs)["pixel_values"], plain(**kwargs)["pixel_values"])


def test_processors_without_torchvision_are_unchanged() -> None:
    for image_processor in (transformers.CLIPImageProcessorPil(), None):
        processor = SimpleNamespace(image_processor=image_processor)
        assert without_relayout(processor) is processor
