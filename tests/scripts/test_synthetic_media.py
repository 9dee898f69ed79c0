"""The synthetic media: reproducible, named truthfully, and real files when written."""

from pathlib import Path

import av
import numpy as np
import pytest
import soundfile as sf
from PIL import Image

from tests.support.synthetic_media import (
    MODALITIES,
    SAMPLE_RATE,
    SOUNDS,
    Clip,
    Modality,
    make_audio,
    make_clip,
    make_image,
    make_item,
    write_audio,
    write_clip,
    write_image,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("modality", MODALITIES)
def test_a_seed_always_makes_the_same_item(modality: Modality) -> None:
    first, again, other = (make_item(modality, 3, index) for index in (5, 5, 6))
    pixels = [item.data.frames if modality == "video" else item.data for item in (first, again, other)]
    assert first.label == again.label
    assert np.array_equal(pixels[0], pixels[1])
    assert not np.array_equal(pixels[0], pixels[2])


def test_an_image_has_the_colour_of_its_label(rng: np.random.Generator) -> None:
    item = make_image(rng, "blue square", size=(64, 48))
    assert item.data.shape == (48, 64, 3)
    assert item.data.dtype == np.uint8
    red, _, blue = np.moveaxis(item.data.astype(int), -1, 0)
    assert (blue - red).max() > 80


@pytest.mark.parametrize("label", SOUNDS)
def test_a_sound_is_a_mono_wave_in_range(rng: np.random.Generator, label: str) -> None:
    wave = make_audio(rng, label, seconds=1.0).data
    assert wave.shape == (SAMPLE_RATE,)
    assert wave.dtype == np.float32
    assert np.abs(wave).max() <= 1


def test_a_shape_in_a_clip_moves_as_its_label_says(rng: np.random.Generator) -> None:
    item = make_clip(rng, "red circle moving left", size=(96, 64), seconds=1.0, fps=10.0, codec=False)
    clip: Clip = item.data
    red, green, _ = np.moveaxis(clip.frames.astype(int), -1, 0)
    columns = [np.nonzero(frame > 80)[1].mean() for frame in (red - green)[[0, -1]]]
    assert columns[1] < columns[0] - 10


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_written_image_is_read_back(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    pixels = make_image(rng, size=(60, 40)).data
    write_image(tmp_path / name, pixels)
    assert np.abs(np.asarray(Image.open(tmp_path / name)).astype(int) - pixels).mean() < 12


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3"])
def test_a_written_sound_is_read_back(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    wave = make_audio(rng, "low tone", seconds=1.0).data
    write_audio(tmp_path / name, wave)
    read, rate = sf.read(tmp_path / name)
    assert rate == SAMPLE_RATE
    assert len(read) == pytest.approx(len(wave), abs=3000)


def test_a_written_clip_is_read_back(tmp_path: Path, rng: np.random.Generator) -> None:
    clip: Clip = make_clip(rng, size=(64, 48), seconds=1.0, fps=12.0, codec=False).data
    write_clip(tmp_path / "a.mp4", clip)
    with av.open(tmp_path / "a.mp4") as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == clip.frames.shape
    assert np.abs(frames.astype(int) - clip.frames).mean() < 12
