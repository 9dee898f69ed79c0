"""The result of processing one item."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.processor.placeholders import run_lengths
from deployments.types import Affixes, Arrays, MMFeatures, Modality, Normalization, Payload


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    modality: Modality
    token_ids: list[int]  # replace the placeholder
    num_tokens: int  # how many of them are positions that embeddings fill
    features: Arrays
    affixes: Affixes
    digest: str  # of everything that shaped this item
    family: str  # class of the processor
    normalizations: dict[str, Normalization] = field(default_factory=dict)  # see `MMFeatures`

    def record(self, payload: Payload | None) -> MMFeatures:
        """The record for other stages; `payload` holds `features`."""
        return MMFeatures(
            modality=self.modality,
            digest=self.digest,
            num_tokens=self.num_tokens,
            replacement=run_lengths(self.token_ids),
            payload=payload,
            shapes={
                name: (array.shape, "float32" if name in self.normalizations else array.dtype.name)
                for name, array in self.features.items()
            },
            affixes=self.affixes,
            family=self.family,
            normalizations=self.normalizations,
        )
