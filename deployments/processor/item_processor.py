"""Processes one media item as if the checkpoint's processor had seen the whole conversation.

The processor expands a text with one placeholder in it. We find the token range that replaces the
placeholder: it begins and ends with a *split token*, a token at which the tokenizer always splits.

    text      <wrapper>             <placeholder>                  <wrapper>
    expanded  <wrapper> plain text  <split><pad>...<pad><split>  plain text <wrapper>
                        |- affix -|  |------- item span ------|  |- affix -|

The item span takes the placeholder's place in the prompt, as token ids. The affixes may merge with the text
next to them, so they are encoded together with that text. The wrapper tokens are split tokens that the chat
template writes: the prompt has them already, but some processors expect them around the placeholder.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.errors import InvalidMedia, ServingError
from deployments.processor.arguments import KWARGS, DecodedItem, media_arguments, media_options
from deployments.processor.checkpoint import placeholders_of, tokenizer_of
from deployments.processor.embed_form import embeds_forms
from deployments.processor.joining import join_rule, part
from deployments.processor.normalization import AS_BYTES, declared_normalization, deferrable
from deployments.processor.pixel_layout import without_relayout
from deployments.processor.placeholders import PER_TOKEN
from deployments.processor.processed_item import ProcessedItem
from deployments.processor.protocols import Processor
from deployments.processor.settings import WORKERS, ProcessorSettings, as_kwargs, settings_of
from deployments.runtime.hashing import digest
from deployments.runtime.payload import INLINE_BYTES
from deployments.types import Affixes, Arrays, InputSpec, Media, Modality, Normalization

_OFFSETS = "text_replacement_offsets"  # transformers' name for the texts that replaced the placeholders
_SMALL_IMAGE = np.zeros((224, 224, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class Handling:
    """The way in which items of one modality are processed.

    `deployments.processor.exactness` chooses it at start.
    """

    jointly: bool = False  # all items of a request in one call, because they influence each other
    normalizations: dict[str, Normalization] = field(default_factory=dict)  # feature -> applied by the model


class ItemProcessor:
    """One processor. It must not be used by several threads at once, because of its tokenizer.

    `process` gives the features that one call over the whole conversation would give for the item.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = without_relayout(processor)
        self.family = type(processor).__name__
        self.handlings: Mapping[Modality, Handling] = dict.fromkeys(placeholders_of(processor), Handling())
        self._tokenizer = tokenizer_of(processor)
        self._placeholders = placeholders_of(processor)
        split_tokens = self._find_split_tokens()
        self._split_ids = frozenset(self._tokenizer.convert_tokens_to_ids(split_tokens))
        self._wrappers = {
            modality: _wrapper_tokens(processor, modality, token, split_tokens)
            for modality, token in self._placeholders.items()
        }
        self._settings = {modality: settings_of(processor, modality) for modality in self._placeholders}
        self._fingerprint = self._digest_of_processor() if self._placeholders else ""

    @property
    def joint(self) -> list[Modality]:
        return [modality for modality, handling in self.handlings.items() if handling.jointly]

    def handling(self, handlings: Mapping[Modality, Handling]) -> ItemProcessor:
        """This processor for these modalities only, handled like this. It shares everything else."""
        other = copy.copy(self)
        other.handlings = dict(handlings)
        return other

    def spec(self) -> InputSpec:
        return InputSpec(
            list(self.handlings),
            media_options(self.processor),
            settings={name: most for m in self.handlings for name, most in self._settings[m].items()},
            joint=self.joint,
            embeds=embeds_forms(self.handlings, self._process_one),
            small_images_inline=self._fits_inline(_SMALL_IMAGE),
        )

    def process(
        self, items: Sequence[DecodedItem], settings: ProcessorSettings | None = None
    ) -> list[ProcessedItem]:
        """Processes items of one modality in one call of the processor; their arrays are only read.

        Raises InvalidMedia or MediaTooLarge, or ServingError if no item of this family can be served.
        """
        modality = items[0][0].modality
        normalizations = self.handlings[modality].normalizations
        call = self._call(
            modality, items, self._applicable(modality, settings), as_bytes=bool(normalizations)
        )
        digests = self.digests([media for media, _ in items], settings)
        processed = []
        for index, span in enumerate(self._item_spans(modality, call.token_ids, len(items))):
            token_ids = call.token_ids[span]
            features = {
                name: array[:, span]
                if name in PER_TOKEN
                else part(array, join_rule(self.family, name), index, len(items))
                for name, array in call.features.items()
            }
            processed.append(
                ProcessedItem(
                    modality,
                    token_ids,
                    self._num_tokens(token_ids),
                    features,
                    self._affixes(call.replacements[index], token_ids),
                    digests[index],
                    self.family,
                    normalizations,
                )
            )
        return processed

    def digests(self, items: Sequence[Media], settings: ProcessorSettings | None = None) -> list[str]:
        """Returns a digest for each item, over everything that shapes its result in `process`."""
        modality = items[0].modality
        applicable = sorted(self._applicable(modality, settings).items())
        contents = [media.digest for media in items]
        shaping = (modality, self._fingerprint, repr(applicable), *contents)
        return [digest(*shaping, str(place)) for place in range(len(items))]

    def find_normalizations(self, item: DecodedItem) -> dict[str, Normalization]:
        """The normalizations that the model can apply later, by feature; empty if a bit would differ.

        `item` has all 256 bytes in each channel, also after the processor has resized it.
        """
        modality = item[0].modality
        normalization = declared_normalization(getattr(self.processor, WORKERS.get(modality, ""), None))
        if normalization is None:
            return {}
        exact = self._call(modality, [item], {}, as_bytes=False).features
        raw = self._call(modality, [item], {}, as_bytes=True).features
        return deferrable(exact, raw, normalization)

    def _process_one(self, media: Media, arrays: Arrays) -> ProcessedItem:
        return self.process([(media, arrays)])[0]

    def _fits_inline(self, pixels: npt.NDArray[np.uint8]) -> bool:
        """Measures whether the features of an image of this size travel in the message."""
        if Modality.IMAGE not in self.handlings:
            return False
        try:
            done = self._process_one(Media(Modality.IMAGE, "small image"), {"pixels": pixels})
        except ServingError:  # the processor refuses this size
            return False
        return sum(array.nbytes for array in done.features.values()) <= INLINE_BYTES

    def _applicable(self, modality: Modality, settings: ProcessorSettings | None) -> ProcessorSettings:
        """The settings of a request that concern this modality."""
        return {name: value for name, value in (settings or {}).items() if name in self._settings[modality]}

    def _call(
        self, modality: Modality, items: Sequence[DecodedItem], settings: ProcessorSettings, as_bytes: bool
    ) -> _Call:
        before, after = self._wrappers[modality]
        media, options = media_arguments(self.processor, modality, items)
        options |= as_kwargs(self.processor, modality, settings) | (AS_BYTES if as_bytes else {})
        options["return_tensors"] = "pt"
        wrapped = before + self._placeholders[modality] + after
        try:
            answer = self.processor(
                text=[self._separator.join([wrapped] * len(items))],
                text_kwargs={"add_special_tokens": False},
                return_text_replacement_offsets=True,
                **media,
                **{KWARGS[modality]: options},
            )
        except ValueError as error:
            raise InvalidMedia(
                f"The model's processor refuses this {modality}: {_in_words(error)}"
            ) from error
        # Not `return_tensors` for the whole call: some processors would try to make tensors of the offsets.
        values = dict(answer.convert_to_tensors("pt", skip_tensor_conversion=[_OFFSETS]))
        return _Call.of(values)

    @property
    def _separator(self) -> str:
        """Stands between two items of one call: a token that belongs to neither of them."""
        special = self._tokenizer.special_tokens_map
        return special.get("eos_token") or special.get("pad_token") or ""

    def _item_spans(self, modality: Modality, token_ids: list[int], count: int) -> list[slice]:
        """The range of each item, from its first to its last split token."""
        before, after = self._wrappers[modality]
        ends = [len(token_ids)]
        if count > 1:
            separator = self._tokenizer.convert_tokens_to_ids(self._separator)
            ends = [i for i, token_id in enumerate(token_ids) if token_id == separator] + ends
        spans, start = [], 0
        for end in ends:
            inner = range(start + bool(before), end - bool(after))
            first = next((i for i in inner if token_ids[i] in self._split_ids), None)
            last = next((i for i in reversed(inner) if token_ids[i] in self._split_ids), None)
            if first is None or last is None:
                raise InvalidMedia(
                    f"The model makes no tokens of this {modality}, because it is too short or too small."
                    " Send a longer or larger one."
                )
            spans.append(slice(first, last + 1))
            start = end + 1
        return spans

    def _affixes(self, replacement: str, token_ids: list[int]) -> Affixes:
        """The plain text of a replacement before its first and after its last split token."""
        first, last = self._tokenizer.convert_ids_to_tokens([token_ids[0], token_ids[-1]])
        prefix, found_first, _ = replacement.partition(first)
        _, found_last, suffix = replacement.rpartition(last)
        if not found_first or not found_last:
            raise ServingError(f"Media of this model's family ({self.family}) cannot be served yet.")
        return prefix, suffix

    def _num_tokens(self, token_ids: list[int]) -> int:
        """The positions of embeddings: no other split token of a family is as frequent."""
        counts = Counter(token_ids).items()
        return max(count for token_id, count in counts if token_id in self._split_ids)

    def _find_split_tokens(self) -> list[str]:
        """Added tokens, the longest first, without white space: a run of it may be another token."""
        added = self._tokenizer.added_tokens_decoder.values()
        contents = (token.content for token in added if not token.content.isspace())
        return sorted(contents, key=len, reverse=True)

    def _digest_of_processor(self) -> str:
        import transformers

        kwargs = (repr(getattr(self.processor, name, None)) for name in (*KWARGS.values(), "text_kwargs"))
        tokenizer = self._tokenizer.backend_tokenizer.to_str()
        return digest(transformers.__version__, self.processor.to_json_string(), tokenizer, *kwargs)


@dataclass(frozen=True, slots=True)
class _Call:
    """The result of one call of the processor."""

    replacements: list[str]  # the text that replaced each placeholder
    token_ids: list[int]  # of the whole expanded text
    features: Arrays

    @classmethod
    def of(cls, values: dict[str, object]) -> _Call:
        offsets, input_ids = values.pop(_OFFSETS), np.asarray(values.pop("input_ids"))
        values.pop("attention_mask", None)
        assert isinstance(offsets, list)
        replacements = [offset["replacement"] for offset in offsets[0]]
        features = {name: np.ascontiguousarray(value) for name, value in values.items()}
        return cls(replacements, input_ids[0].tolist(), features)


def _wrapper_tokens(
    processor: Processor, modality: Modality, placeholder: str, split_tokens: list[str]
) -> tuple[str, str]:
    """The split tokens that the chat template puts right before and after an item; "" if there is none."""
    from jinja2 import TemplateError

    text: dict[str, object] = {"type": "text", "text": "a"}
    message: dict[str, object] = {"role": "user", "content": [text, {"type": str(modality)}, text]}
    try:
        rendered = processor.apply_chat_template([message], tokenize=False)
    except (TemplateError, TypeError):  # the template takes only strings as content
        return "", ""
    left, _, right = rendered.partition(placeholder)
    before = next((token for token in split_tokens if left.endswith(token)), "")
    after = next((token for token in split_tokens if right.startswith(token)), "")
    return before, after


def _in_words(error: ValueError) -> str:
    """The message of an error without paths and reprs, cut to a sentence or two."""
    words = re.sub(r"<[^<>|]*>|(?:/[\w.-]+){2,}", "(...)", " ".join(str(error).split()))
    return words[:300].rstrip(".") + "."
