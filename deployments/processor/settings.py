"""What a request may set of the checkpoint's processor (`mm_processor_kwargs`), and within what bounds.

Nothing may make an item cost more than the checkpoint itself allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.errors import InvalidRequest
from deployments.types import Modality

ProcessorSettings = Mapping[str, int | bool]

# Where a number's ceiling stands in a processor of images or videos; None for what is on or off.
SETTINGS: dict[str, str | None] = {
    "min_pixels": "size",
    "max_pixels": "size",
    "max_patches": "max_patches",  # tiles of an image
    "dynamic_hd": "dynamic_hd",  # the same in Phi-4
    "max_soft_tokens": "max_soft_tokens",
    "crop_to_patches": None,
    "do_image_splitting": None,
    "do_pan_and_scan": None,
}

_WORKERS = {Modality.IMAGE: "image_processor", Modality.VIDEO: "video_processor"}


def settings_of(processor: Any, modality: Modality) -> dict[str, int | None]:
    """The settings that a modality of this processor takes, and their ceilings."""
    worker = getattr(processor, _WORKERS.get(modality, ""), None)
    takes = getattr(getattr(worker, "valid_kwargs", None), "__annotations__", {})
    found: dict[str, int | None] = {}
    for name in SETTINGS.keys() & takes.keys():
        attribute = SETTINGS[name]
        if attribute == "size":
            found[name] = _size(processor, modality)["longest_edge"]
        else:
            found[name] = getattr(worker, attribute) if attribute else None
    return found


def as_kwargs(processor: Any, modality: Modality, settings: ProcessorSettings) -> dict[str, Any]:
    """Settings in the processor's own words: bounds of pixels are its size."""
    kwargs: dict[str, Any] = dict(settings)
    least, most = kwargs.pop("min_pixels", None), kwargs.pop("max_pixels", None)
    if least or most:
        given = {"shortest_edge": least, "longest_edge": most}
        kwargs["size"] = {edge: given[edge] or own for edge, own in _size(processor, modality).items()}
    return kwargs


def check_settings(
    settings: ProcessorSettings, ceilings: Mapping[str, int | None], others: Iterable[str] = ()
) -> None:
    """Raises InvalidRequest. `others`: settings of the same field that are not the processor's."""
    for name, value in settings.items():
        param = f"mm_processor_kwargs.{name}"
        if name not in ceilings:
            allowed = ", ".join(sorted({*ceilings, *others})) or "none"
            raise InvalidRequest(
                f"{param}: this model's processor has no such setting. Its settings: {allowed}.", param
            )
        ceiling = ceilings[name]
        if ceiling is not None and value > ceiling:
            raise InvalidRequest(f"{param} is {value}; the largest value of this model is {ceiling}.", param)
    if settings.get("min_pixels", 0) > settings.get("max_pixels", float("inf")):
        raise InvalidRequest("min_pixels is greater than max_pixels.", "mm_processor_kwargs.min_pixels")


def _size(processor: Any, modality: Modality) -> dict[str, int]:
    """As the processor is called: its class may set the size of videos over that of its video processor."""
    over = getattr(processor, f"{modality}s_kwargs", {}).get("size")
    size = over or getattr(processor, _WORKERS[modality]).size
    return {edge: size[edge] for edge in ("shortest_edge", "longest_edge")}
