"""The parts of transformers' untyped classes that this package uses."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, Sequence
from typing import Literal, Protocol, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer


class Tokenizer(Protocol):
    """A fast tokenizer: `transformers.PreTrainedTokenizerFast`."""

    bos_token: str | None
    eos_token_id: int | None
    chat_template: str
    backend_tokenizer: BackendTokenizer
    added_tokens_decoder: dict[int, AddedToken]
    special_tokens_map: dict[str, str]

    def __len__(self) -> int: ...
    def get_vocab(self) -> dict[str, int]: ...
    def add_tokens(self, tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> str: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...
    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...


class BatchFeature(Protocol):
    """Features by name, as a processor returns them."""

    def items(self) -> ItemsView[str, object]: ...

    def convert_to_tensors(
        self, tensor_type: str, *, skip_tensor_conversion: list[str]
    ) -> Mapping[str, object]: ...


class AudioExtractor(Protocol):
    """A feature extractor of sounds: `transformers.SequenceFeatureExtractor`."""

    sampling_rate: int  # Hz

    def __call__(self, raw_speech: object, **kwargs: object) -> BatchFeature: ...


class Processor(Protocol):
    """A multimodal processor: `transformers.ProcessorMixin`. Its parts for media differ by family."""

    tokenizer: Tokenizer
    chat_template: str | dict[str, str] | None
    model_input_names: list[str]
    image_processor: object
    videos_kwargs: dict[str, object]

    def __call__(self, *, text: list[str], **kwargs: object) -> BatchFeature: ...
    def to_json_string(self) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: list[dict[str, object]], *, tokenize: Literal[False]
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: list[dict[str, object]], *, tokenize: Literal[True], **kwargs: object
    ) -> BatchFeature: ...
