"""The records that cross processes. One concept, one definition; tensors travel beside them in a Payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import numpy.typing as npt

T = TypeVar("T")


class Modality(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


Arrays = dict[str, npt.NDArray[Any]]

# Mean and standard deviation of each channel, float32: a value is (byte - mean) / std.
Normalization = tuple[tuple[float, ...], tuple[float, ...]]

# Plain text that a processor puts right before and after an item's tokens. It grows together with the text
# around it, so it is encoded with the prompt.
Affixes = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Payload:
    """Named arrays on their way between processes. Exactly one of `inline` and `ref` is set.

    `deployments.runtime.payload` packs and unpacks them.
    """

    nbytes: int  # bytes of all arrays together
    inline: bytes | None = None  # pickled Arrays, for small ones
    ref: Any = None  # ray.ObjectRef of Arrays, for large ones


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where one media item comes from, as the client named it."""

    modality: Modality
    kind: Literal["url", "data"]
    url: str = ""  # kind "url": http(s):// or file://
    header: str = ""  # kind "data": what stands between "data:" and the comma, e.g. "image/png;base64"
    payloads: list[Payload] = field(default_factory=list)  # kind "data": what follows the comma, in pieces
    sample: str = ""  # kind "data": a digest of a part of it, as an affinity key

    @property
    def nbytes(self) -> int:
        """Bytes of the data in the request, still encoded."""
        return sum(payload.nbytes for payload in self.payloads)

    def release(self) -> None:
        """Drops the data, see `deployments.runtime.memory`."""
        self.payloads.clear()


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How media are to be decoded: as the model's processor wants, where the request does not say."""

    sampling_rate: int = 16000  # Hz, audio is resampled to it
    num_frames: int | None = None  # video: at most so many frames, uniform over the clip
    fps: float | None = None  # video: frames per second of the clip to keep
    max_duration: float | None = None  # s; by `fps`, a longer video gets no more frames than one so long
    background: tuple[int, int, int] = (255, 255, 255)  # RGB under what is transparent in an image
    previews: bool = False  # whether `Media.previews` are wanted
    decode_again: bool = True  # the arrays are wanted of what was decoded before, too


class MediaUUID(NamedTuple):
    """What a client calls an item. Clients with different salts never see each other's."""

    salt: str
    modality: Modality
    uuid: str


class VideoMetadata(TypedDict):
    """Sampling of a video, by the names that Hugging Face processors use."""

    total_num_frames: int
    fps: float  # of the whole clip
    frames_indices: list[int]  # of the frames that were kept
    duration: float  # s


@dataclass(frozen=True, slots=True)
class Media:
    """One decoded item.

    Arrays of the payload: image {"pixels": uint8[H, W, 3]}; audio {"samples": float32[n]}, mono, in [-1, 1];
    video {"frames": uint8[T, H, W, 3]}.
    """

    modality: Modality
    digest: str  # hex blake3 over modality, the encoded bytes and the options that shaped the arrays
    payload: Payload | None = None  # None: the arrays were not kept, or are not needed
    info: dict[str, Any] = field(default_factory=dict)  # what `render` shows as "media"
    num_bytes: int = 0  # encoded size as fetched or sent
    mime: str = ""  # by content, e.g. "image/png"
    video_metadata: VideoMetadata | None = None
    previews: list[str] = field(default_factory=list)  # data: URIs, see deployments.media.previews
    cached: bool = False
    uuid: MediaUUID | None = None  # by which it may be asked for again

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded arrays that travel with the record."""
        return self.payload.nbytes if self.payload else 0


# Features with the seconds of a step of a video's grid, as families call them; clients may use either.
SECONDS_PER_GRID = ("second_per_grid_ts", "video_second_per_grid")


@dataclass(frozen=True, slots=True)
class EmbedsForm:
    """How embeddings that a client sends take the place of an item of one modality, or of a piece of text."""

    token_id: int  # one for each embedding
    before: list[tuple[int, int]] = field(default_factory=list)  # what the family puts around them in the
    after: list[tuple[int, int]] = field(default_factory=list)  # prompt, as (token id, count)
    token_types: dict[str, int] = field(default_factory=dict)  # of per-token features: their value
    grid: str = ""  # name of the feature (t, h, w) that the model derives positions from; empty: none
    merge: int = 1  # so many cells of the grid's height, and of its width, are one embedding
    affixes: Affixes = ("", "")
    seconds: str = ""  # the one of SECONDS_PER_GRID that the model takes; empty: none


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """One item's embeddings as the client sent them, by its names and in its order.

    For a name there is the base64 of a torch.save, safetensors or npy file, in pieces (uint8[n] each, see
    `deployments.runtime.payload.unpack_pieces`), or plain numbers, int64 or float64.
    """

    modality: Modality | None  # None: prompt embeddings
    sent: dict[str, list[Payload] | npt.NDArray[Any]]
    form: EmbedsForm
    hidden_size: int  # the model's

    @property
    def name(self) -> str:
        return embeds_name(self.modality)

    @property
    def nbytes(self) -> int:
        """Bytes of the base64 in the request."""
        return sum(
            payload.nbytes for sent in self.sent.values() if isinstance(sent, list) for payload in sent
        )

    def release(self) -> None:
        """Drops the data, see `deployments.runtime.memory`."""
        self.sent.clear()


def embeds_name(modality: Modality | None) -> str:
    """Of an item's embeddings: in requests, and among the arrays of its features."""
    return f"{modality or 'prompt'}_embeds"


@dataclass(frozen=True, slots=True)
class MMFeatures:
    """One item as the model takes it.

    Arrays of the payload: whatever the Hugging Face processor returned for this item alone (`pixel_values`,
    `image_grid_thw`, ...), but for the token ids, which are in `replacement`; what is in
    `normalizations`, as uint8. Of an item that was sent as embeddings: `embeds_name` [num_tokens, hidden
    size], bfloat16 as its bits in uint16, and the like of `image_grid_thw`.
    """

    modality: Modality | None  # None: prompt embeddings
    digest: str  # hex blake3 over all that shaped the features: the media, the processor, its settings
    num_tokens: int  # placeholder positions in the prompt that the item's embeddings fill
    replacement: list[tuple[int, int]]  # what replaces the placeholder in the prompt, as (token id, count)
    payload: Payload | None  # None: left out of a message for which it is too large
    shapes: dict[str, tuple[tuple[int, ...], str]]  # feature name -> (shape, dtype name), as the processor's
    cached: bool = False
    affixes: Affixes = ("", "")
    family: str = ""  # class of the processor: how features of several items join
    normalizations: dict[str, Normalization] = field(
        default_factory=dict
    )  # feature name -> what is left to do

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that travel with the record."""
        return self.payload.nbytes if self.payload else 0

    @property
    def length(self) -> int:
        """Token ids that replace the placeholder: `num_tokens` and what the family wraps around them."""
        return sum(count for _, count in self.replacement)


@dataclass(frozen=True, slots=True)
class MMItem:
    """An item and what became of it."""

    media: Media  # without its arrays
    features: MMFeatures


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the chat template.

    Media parts are {"type": "image" | "audio" | "video"}, embeddings in the place of text {"type": "prompt"}.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    num_text_bytes: int = 0  # UTF-8 bytes of all texts and names


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a rendered chat, with one placeholder token per item."""

    token_ids: list[int]
    placeholders: list[tuple[Modality | None, int]]  # in item order: its modality, and its index in token_ids


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    tokens: list[str] = field(default_factory=list)  # each as the vocabulary has it, where they are wanted


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is drawn. A value that changes nothing is the default of each field."""

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # of the most likely token's probability
    repetition_penalty: float = 1.0  # of what is in the prompt or the answer, as a factor
    presence_penalty: float = 0.0  # of what is in the answer, once
    frequency_penalty: float = 0.0  # of what is in the answer, for each time
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # one seed, one answer, whatever else is running
    min_tokens: int = 0  # neither an end nor `stop_token_ids` before so many
    stop_token_ids: tuple[int, ...] = ()  # end the answer and are not part of it
    ignore_eos: bool = False  # go on to max_tokens
    top_logprobs: int | None = None  # alternatives told for each token; None: no logprobs at all
    n: int = 1  # answers


class TokenLogprob(NamedTuple):
    """How likely the model itself held a token, before penalties and temperature."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), the likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """What the model produced for one of the answers since its last one; its last has a `finish_reason`.

    The token that ends an answer is not in `token_ids`, so the tokens of all deltas are the completion, and
    their number is what usage counts.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0  # of the answer, below `SamplingParams.n`
    logprobs: list[TokenLogprob] = field(default_factory=list)  # for each token, where asked for
    cached_tokens: int = 0  # set on the first delta: tokens of the prompt that needed no work
    queue_ms: float = 0.0  # set on the first delta: waited for the engine
    prefill_ms: float = 0.0  # set on the first delta: until the first token was there


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What travels with every call of a stage, beside the arguments."""

    timeout_s: float | None = None  # time left until the request's deadline; None: no limit
    param: str = ""  # the item's place in the request: "messages[0].content[1]"
    trace: Mapping[str, str] | None = None  # the caller's W3C trace context; None: tracing is off


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """What a stage sends back for a call: the value, and how long the stage worked on it."""

    value: T
    service_ms: float  # at work in the stage's threads
    fetch_ms: float = 0.0  # in addition: waiting for the media host


@dataclass(frozen=True, slots=True)
class Activity:
    """A snapshot of one replica: its queue, and what it has done since it started."""

    name: str  # of the stage, or of a part of it: "MediaLoader.fetch"
    queued: int  # items, or answers of the model, that wait
    in_flight: int  # that are worked on
    done: int
    hits: int = 0  # of its caches
    misses: int = 0
    room: int = 0  # of the engine: answers that could be worked on besides


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    tokenizer_json: str  # loads with tokenizers.Tokenizer.from_str: the ingress detokenizes with it
    special_token_ids: list[int] = field(default_factory=list)  # left out of the text
    max_token_length: int = 1  # characters; bytes, for a tokenizer of bytes
    plain_token_id: int = 0  # of any token of plain text: stands in `token_ids` for embedded text


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What the processor takes, asked once by the ingress."""

    modalities: list[Modality]
    options: MediaOptions
    # What a request may set of the processor, by name, and the largest value; None for what is on or off.
    settings: dict[str, int | None] = field(default_factory=dict)
    caches: bool = False  # whether what was processed before is kept: then it need not be decoded again
    joint: list[Modality] = field(default_factory=list)  # all items of a request are processed in one call
    embeds: dict[Modality, EmbedsForm] = field(default_factory=dict)  # of the modalities that can be embedded
    # The features of a 224 x 224 image are at most INLINE_BYTES, so they travel in the message.
    small_images_inline: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    max_model_len: int  # tokens of prompt and answer together
    hidden_size: int | None = None  # of its embeddings; None: it needs more of its inputs than embeddings
    default_sampling: dict[str, Any] = field(default_factory=dict)  # from generation_config.json
    device: str = "cpu"
    dtype: str = "float32"
    vocab_size: int = 0
