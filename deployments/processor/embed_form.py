"""Finds out from a sample how a family places an item's embeddings in the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from deployments.errors import ServingError
from deployments.processor.placeholders import PER_TOKEN, run_lengths
from deployments.processor.processed_item import ProcessedItem
from deployments.types import SECONDS_PER_GRID, Arrays, EmbedsForm, Media, Modality, VideoMetadata

Process = Callable[[Media, Arrays], ProcessedItem]


def embeds_forms(modalities: Iterable[Modality], process: Process) -> dict[Modality, EmbedsForm]:
    """The forms of the modalities of which clients can send embeddings. `process` calls the processor.

    The embeddings of an item must be one uninterrupted run. If a family has more between them, such as the
    time before each frame, their positions do not follow from their number.
    """
    forms = {m: _form(m, process) for m in modalities}
    return {modality: form for modality, form in forms.items() if form}


def _form(modality: Modality, process: Process) -> EmbedsForm | None:
    media = Media(modality, "", video_metadata=_SAMPLED if modality == Modality.VIDEO else None)
    try:
        made = process(media, _SAMPLES[modality])
    except ServingError:  # media of this family cannot be served
        return None
    runs = run_lengths(made.token_ids)
    token_id, num_tokens = max(runs, key=lambda run: run[1])
    places = [index for index, (run_id, _) in enumerate(runs) if run_id == token_id]
    if len(places) != 1 or num_tokens != made.num_tokens:
        return None
    first = made.token_ids.index(token_id)
    grid = f"{modality}_grid_thw"
    cells = math.prod(made.features[grid][0].tolist()) if grid in made.features else made.num_tokens
    return EmbedsForm(
        token_id,
        before=runs[: places[0]],
        after=runs[places[0] + 1 :],
        affixes=made.affixes,
        token_types={name: int(made.features[name][0, first]) for name in PER_TOKEN & made.features.keys()},
        grid=grid if grid in made.features else "",
        merge=math.isqrt(cells // made.num_tokens),
        seconds=next((name for name in SECONDS_PER_GRID if name in made.features), ""),
    )


_SAMPLED: VideoMetadata = {
    "total_num_frames": 4,
    "fps": 2.0,
    "frames_indices": [0, 1, 2, 3],
    "duration": 2.0,
}
_SAMPLES: dict[Modality, Arrays] = {
    Modality.IMAGE: {"pixels": np.zeros((64, 64, 3), np.uint8)},
    Modality.AUDIO: {"samples": np.zeros(16000, np.float32)},
    Modality.VIDEO: {"frames": np.zeros((4, 64, 64, 3), np.uint8)},
}
