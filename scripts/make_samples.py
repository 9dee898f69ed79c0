"""Makes the sample media of the documentation: `python -m scripts.make_samples`."""

from pathlib import Path

import numpy as np

from tests.support.synthetic_media import (
    make_audio,
    make_clip,
    make_image,
    write_audio,
    write_clip,
    write_image,
)

FOLDER = Path(__file__).parent.parent / "docs" / "samples"
LABELS = {  # file name -> what is in it
    "photo.png": "red circle",
    "photo.jpg": "blue triangle",
    "sound.wav": "rising tone",
    "sound.mp3": "beeps",
    "clip.mp4": "green square moving right",
}


def main() -> None:
    """Write every sample. The seed gives a plain scene without noise, so that the files are small."""
    FOLDER.mkdir(parents=True, exist_ok=True)

    def rng() -> np.random.Generator:
        return np.random.default_rng(9)

    for name in ("photo.png", "photo.jpg"):
        write_image(FOLDER / name, make_image(rng(), LABELS[name], size=(320, 240)).data)
    for name in ("sound.wav", "sound.mp3"):
        write_audio(FOLDER / name, make_audio(rng(), LABELS[name], seconds=1.5).data)
    clip = make_clip(rng(), LABELS["clip.mp4"], size=(320, 240), seconds=2.0, fps=24.0, codec=False)
    write_clip(FOLDER / "clip.mp4", clip.data)


if __name__ == "__main__":
    main()
