"""The records that cross processes, one definition for each concept. Tensors travel in a Payload."""

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

# Plain text that a processor puts directly before and after an item's tokens. It is encoded together with the
# text around it, since tokens may span both.
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
    """The source of one media item, as the client gave it."""

    modality: Modality
    kind: Literal["url", "data"]
    url: str = ""  # kind "url": http(s):// or file://
    header: str = ""  # kind "data": the text between "data:" and the comma: "image/png;base64"
    payloads: list[Payload] = field(default_factory=list)  # kind "data": the text after the comma, in pieces
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
    """Options of decoding: the request's, or else those of the model's processor."""

    sampling_rate: int = 16000  # Hz, audio is resampled to it
    num_frames: int | None = None  # video: the most frames, uniform over the clip
    fps: float | None = None  # video: frames per second of the clip to keep
    max_duration: float | None = (
        None  # s; with `fps`, a longer video gets no more frames than one of this length
    )
    background: tuple[int, int, int] = (255, 255, 255)  # RGB under transparent pixels of an image
    previews: bool = False  # make `Media.previews`
    decode_again: bool = True  # return the arrays even of an item that was decoded before


class MediaUUID(NamedTuple):
    """A client's own name for an item. Clients with different salts never see each other's items."""

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
    info: dict[str, Any] = field(default_factory=dict)  # facts that `render` shows as "media"
    num_bytes: int = 0  # encoded size as fetched or sent
    mime: str = ""  # by content, e.g. "image/png"
    video_metadata: VideoMetadata | None = None
    previews: list[str] = field(default_factory=list)  # data: URIs, see deployments.media.previews
    cached: bool = False
    uuid: MediaUUID | None = None  # with which it can be recalled

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded arrays that travel with the record."""
        return self.payload.nbytes if self.payload else 0


# Names of the feature with the seconds of one step of a video's grid. Clients may use either.
SECONDS_PER_GRID = ("second_per_grid_ts", "video_second_per_grid")


@dataclass(frozen=True, slots=True)
class EmbedsForm:
    """Rules by which a client's embeddings replace an item of one modality, or a piece of text."""

    token_id: int  # one for each embedding
    # The family's wrapper tokens around them in the prompt, as (token id, count).
    before: list[tuple[int, int]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    token_types: dict[str, int] = field(
        default_factory=dict
    )  # per-token feature -> its value for these tokens
    grid: str = ""  # name of the feature (t, h, w) from which the model derives positions; empty: none
    merge: int = 1  # cells of the grid's height, and of its width, for one embedding
    affixes: Affixes = ("", "")
    seconds: str = ""  # the name of SECONDS_PER_GRID that the model uses; empty: none


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """One item's embeddings as the client sent them, in its order.

    A value is the base64 of a torch.save, safetensors or npy file, in pieces of uint8[n] (see
    `deployments.runtime.payload.unpack_pieces`), or plain numbers of int64 or float64.
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
    """Returns the name of an item's embeddings, in requests and among the arrays of its features."""
    return f"{modality or 'prompt'}_embeds"


@dataclass(frozen=True, slots=True)
class MMFeatures:
    """One item as the model takes it.

    Arrays of the payload: the Hugging Face processor's output for this item alone (`pixel_values`,
    `image_grid_thw`, ...) without the token ids, which are in `replacement`. Features in `normalizations` are
    uint8. Embeddings of a client are `embeds_name` [num_tokens, hidden size], with bfloat16 as its bits in
    uint16, and features such as `image_grid_thw`.
    """

    modality: Modality | None  # None: prompt embeddings
    digest: str  # hex blake3 over the media, the processor and its settings
    num_tokens: int  # placeholder positions in the prompt that the item's embeddings fill
    replacement: list[tuple[int, int]]  # tokens that replace the placeholder, as (token id, count)
    payload: Payload | None  # None: left out of a message for which it is too large
    shapes: dict[str, tuple[tuple[int, ...], str]]  # feature name -> (shape, dtype name), as the processor's
    cached: bool = False
    affixes: Affixes = ("", "")
    family: str = ""  # class of the processor; see `deployments.processor.joining`
    # By feature: the normalization that the model stage applies.
    normalizations: dict[str, Normalization] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that travel with the record."""
        return self.payload.nbytes if self.payload else 0

    @property
    def length(self) -> int:
        """Number of tokens that replace the placeholder: `num_tokens` and the family's wrapper tokens."""
        return sum(count for _, count in self.replacement)


@dataclass(frozen=True, slots=True)
class MMItem:
    """A decoded and processed item."""

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
    tokens: list[str] = field(default_factory=list)  # each as the vocabulary writes it, if requested


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for drawing the tokens of an answer. Each field's default changes nothing."""

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # as a share of the most likely token's probability
    repetition_penalty: float = 1.0  # factor for tokens of the prompt and the answer
    presence_penalty: float = 0.0  # for tokens of the answer, once
    frequency_penalty: float = 0.0  # for tokens of the answer, for each occurrence
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # equal seeds give equal answers, in any batch
    min_tokens: int = 0  # the answer cannot end before this many tokens
    stop_token_ids: tuple[int, ...] = ()  # end the answer and are not part of it
    ignore_eos: bool = False  # go on to max_tokens
    top_logprobs: int | None = None  # alternatives for each token; None: no logprobs at all
    n: int = 1  # answers


class TokenLogprob(NamedTuple):
    """The model's own log probability of a token, before penalties and temperature."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Delta:
    """The new tokens of one answer since its last delta. The last delta has a `finish_reason`.

    The token that ends an answer is not in `token_ids`. So the tokens of all deltas are the completion, and
    usage counts them.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0  # of the answer, below `SamplingParams.n`
    logprobs: list[TokenLogprob] = field(default_factory=list)  # for each token, if requested
    cached_tokens: int = 0  # set on the first delta: prompt tokens found in the KV cache
    queue_ms: float = 0.0  # set on the first delta: time in the engine's queue
    prefill_ms: float = 0.0  # set on the first delta: time from there to the first token


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The data of every call of a stage that are not its arguments."""

    timeout_s: float | None = None  # time left until the request's deadline; None: no limit
    param: str = ""  # the item's place in the request: "messages[0].content[1]"
    trace: Mapping[str, str] | None = None  # the caller's W3C trace context; None: tracing is off


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """The answer of a stage: the value, and the time that the stage worked on it."""

    value: T
    service_ms: float  # at work in the stage's threads
    fetch_ms: float = 0.0  # in addition: waiting for the media host


@dataclass(frozen=True, slots=True)
class Activity:
    """A snapshot of one replica: its queue, and what it has done since it started."""

    name: str  # of the stage, or of a part of it: "MediaLoader.fetch"
    queued: int  # items, or sequences of the model, that wait
    in_flight: int  # items, or sequences, being worked on
    done: int
    hits: int = 0  # of its caches
    misses: int = 0
    room: int = 0  # of the engine: sequences that it could start now


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    tokenizer_json: str  # loads with tokenizers.Tokenizer.from_str: the ingress detokenizes with it
    special_token_ids: list[int] = field(default_factory=list)  # left out of the text
    max_token_length: int = 1  # characters; bytes, for a tokenizer of bytes
    plain_token_id: int = 0  # a token of plain text, which stands for embedded text in `token_ids`


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The processor's inputs, which the ingress reads once at start."""

    modalities: list[Modality]
    options: MediaOptions
    # Settings of the processor that a request may change, with the largest value; None for switches.
    settings: dict[str, int | None] = field(default_factory=dict)
    caches: bool = False  # processed items are cached, and so need not be decoded again
    joint: list[Modality] = field(default_factory=list)  # their items are processed in one call
    embeds: dict[Modality, EmbedsForm] = field(default_factory=dict)  # modalities with embeddings
    # The features of a 224 x 224 image are at most INLINE_BYTES, so they travel in the message.
    small_images_inline: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    max_model_len: int  # tokens of prompt and answer together
    hidden_size: int | None = None  # of its embeddings; None: the model needs more of an item than embeddings
    default_sampling: dict[str, Any] = field(default_factory=dict)  # from generation_config.json
    device: str = "cpu"
    dtype: str = "float32"
    vocab_size: int = 0
