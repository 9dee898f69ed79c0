"""Settings of the processor that a request may change (`mm_processor_kwargs`), and their bounds.

No setting may make an item cost more than the checkpoint itself allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deployments.errors import InvalidRequest
from deployments.processor.protocols import Processor
from deployments.types import Modality

ProcessorSettings = Mapping[str, int | bool]

# Setting -> attribute of the image or video processor that is its largest value; None for an on/off setting.
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

# The attribute of a processor that handles a modality.
WORKERS = {Modality.IMAGE: "image_processor", Modality.VIDEO: "video_processor"}


def settings_of(processor: Processor, modality: Modality) -> dict[str, int | None]:
    """The settings for this modality, each with its largest value; None for an on/off setting."""
    worker = getattr(processor, WORKERS.get(modality, ""), None)
    takes = getattr(getattr(worker, "valid_kwargs", None), "__annotations__", {})
    found: dict[str, int | None] = {}
    for name in SETTINGS.keys() & takes.keys():
        attribute = SETTINGS[name]
        if attribute == "size":
            found[name] = _size(processor, modality)["longest_edge"]
        else:
            found[name] = getattr(worker, attribute) if attribute else None
    return found


def as_kwargs(processor: Processor, modality: Modality, settings: ProcessorSettings) -> dict[str, object]:
    """Settings as the processor's arguments: bounds of pixels are its `size`."""
    kwargs: dict[str, object] = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
    given = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
    if any(given.values()):
        kwargs["size"] = {edge: given[edge] or own for edge, own in _size(processor, modality).items()}
    return kwargs


def check_settings(
    settings: ProcessorSettings, ceilings: Mapping[str, int | None], others: Iterable[str] = ()
) -> None:
    """Raises InvalidRequest for an unknown setting or a value out of bounds.

    `others`: settings of the same field that are not the processor's, for the message.
    """
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
        raise InvalidRequest(
            "min_pixels is greater than max_pixels. Lower min_pixels.", "mm_processor_kwargs.min_pixels"
        )


def _size(processor: Processor, modality: Modality) -> dict[str, int]:
    """The size in effect: the processor's class may set one that hides that of its video processor."""
    override = getattr(processor, f"{modality}s_kwargs", {}).get("size")
    size = override or getattr(processor, WORKERS[modality]).size
    return {edge: size[edge] for edge in ("shortest_edge", "longest_edge")}
