from dataclasses import replace

import pytest

from app.intake.long_string import LongString
from app.openai.parse_chat import Item, ParsedChat, media_options, parse_chat, sampling_params
from app.openai.requests import MediaIOKwargs, parse_chat_request
from deployments.errors import InvalidRequest
from deployments.types import MediaOptions, Modality, ModelSpec, SamplingParams


def parsed(
    *messages: object,
    strings: dict[str, LongString] | None = None,
    limits: dict[Modality, int] | None = None,
) -> ParsedChat:
    documents = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    return parse_chat(parse_chat_request({"messages": documents}, strings), limits)


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_items_are_one_flat_list_in_the_order_of_the_user() -> None:
    result = parsed(
        ["a", image("https://h/1"), {"video_url": "https://h/2"}],
        {"role": "assistant", "content": "ok"},
        [{"audio_url": "https://h/3"}, "b", image("https://h/4")],
    )
    assert [(item.param, item.modality, item.url) for item in result.items] == [
        ("messages[0].content[1]", Modality.IMAGE, "https://h/1"),
        ("messages[0].content[2]", Modality.VIDEO, "https://h/2"),
        ("messages[2].content[0]", Modality.AUDIO, "https://h/3"),
        ("messages[2].content[2]", Modality.IMAGE, "https://h/4"),
    ]
    assert [message["content"] for message in result.chat.messages] == [
        [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}],
        "ok",
        [{"type": "audio"}, {"type": "text", "text": "b"}, {"type": "image"}],
    ]


@pytest.mark.parametrize("scheme", ["data:", "DATA:", "Data:"])
def test_a_data_uri_is_cut_at_its_comma_and_not_decoded(scheme: str) -> None:
    (item,) = parsed([image(f"{scheme}image/png;base64,QUJD")]).items
    assert item == Item(
        "messages[0].content[0]", Modality.IMAGE, "data", header="image/png;base64", data=b"QUJD"
    )


def test_a_long_data_uri_stays_out_of_line() -> None:
    moved = LongString((b"data:image/png;base64,QU", b"JDREVG"))
    (item,) = parsed([image("token")], strings={"token": moved}).items
    assert isinstance(item.data, LongString)
    assert (item.header, item.data.join(), item.num_bytes) == ("image/png;base64", b"QUJDREVG", 8)


def test_embeddings_stay_as_they_came() -> None:
    moved = LongString((b"QU", b"JD"))
    tensors = {"image_grid_thw": [1, 2, 2], "x": "QQ==", "image_embeds": "token"}
    image_part = {"type": "image_embeds", "image_embeds": tensors, "uuid": "me"}
    result = parsed(["a", {"type": "prompt_embeds", "data": "QUJD"}, image_part], strings={"token": moved})
    assert result.items == [
        Item("messages[0].content[1]", None, "embeds", tensors={"prompt_embeds": b"QUJD"}),
        Item(
            "messages[0].content[2]",
            Modality.IMAGE,
            "embeds",
            tensors={"image_grid_thw": [1, 2, 2], "x": b"QQ==", "image_embeds": moved},
            uuid="me",
        ),
    ]
    assert [item.num_bytes for item in result.items] == [4, 8]
    assert result.chat.messages[0]["content"][1:] == [{"type": "prompt"}, {"type": "image"}]


def test_embeddings_count_as_items_of_their_modality() -> None:
    embeds = {"image_embeds": "QQ=="}
    with pytest.raises(InvalidRequest, match="has 2 image items; the limit is 1") as caught:
        parsed([image("https://h/1"), embeds], limits={Modality.IMAGE: 1})
    assert caught.value.param == "messages[0].content[1]"
    parsed([{"prompt_embeds": "QQ=="}, embeds], limits={Modality.IMAGE: 1})


def test_what_is_switched_off_names_its_setting() -> None:
    document = {"messages": [{"role": "user", "content": ["a", {"image_embeds": "QQ=="}]}]}
    with pytest.raises(
        InvalidRequest, match=r"not accept image_embeds parts .*enable_mm_embeds is off"
    ) as caught:
        parse_chat(parse_chat_request(document), disabled={"image_embeds": "enable_mm_embeds"})
    assert caught.value.param == "messages[0].content[1]"


def test_a_long_uuid_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="uuid: is too long"):
        parsed([image("https://h/1") | {"uuid": "token"}], strings={"token": LongString((b"x",))})


def test_input_audio_carries_its_format() -> None:
    (item,) = parsed([{"input_audio": {"data": "QUJD", "format": "mp3"}}]).items
    assert (item.modality, item.header, item.data) == (Modality.AUDIO, "audio/mp3;base64", b"QUJD")


def test_input_audio_may_be_a_data_uri() -> None:
    (item,) = parsed([{"input_audio": {"data": "data:audio/ogg;base64,QUJD"}}]).items
    assert (item.header, item.data) == ("audio/ogg;base64", b"QUJD")


def test_long_texts_become_text_again() -> None:
    result = parsed(["token"], "token", strings={"token": LongString(("é".encode(), b"!"))})
    assert [m["content"] for m in result.chat.messages] == [[{"type": "text", "text": "é!"}], "é!"]


def test_a_text_beyond_any_context_is_not_put_together() -> None:
    with pytest.raises(InvalidRequest, match="has 8388609 bytes; the limit is 8388608"):
        parsed("token", strings={"token": LongString((b"x" * (8 * 2**20 + 1),))})


def test_one_item_too_many_is_refused_and_named() -> None:
    content = [image("https://h/1"), {"audio_url": "https://h/2"}, image("https://h/3")]
    assert len(parsed(content, limits={Modality.IMAGE: 2, Modality.AUDIO: 1}).items) == 3
    with pytest.raises(InvalidRequest, match="has 2 image items; the limit is 1") as caught:
        parsed(content, limits={Modality.IMAGE: 1})
    assert caught.value.param == "messages[0].content[2]"
    with pytest.raises(InvalidRequest, match="has 1 audio items; the limit is 0"):
        parsed(content, limits={Modality.AUDIO: 0})


@pytest.mark.parametrize(
    "url", ["", "/etc/passwd", "C:\\x.png", "ftp://h/x", "/9j/4AAQSkZJRg==", "iVBORw0KGgo=", "h" * 20000]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"image_url\.url must be an http\(s\) URL or a data: URI"
    ) as caught:
        parsed(["a", image(url)])
    assert caught.value.param == "messages[0].content[1]"


def test_a_data_uri_without_comma_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no comma"):
        parsed([image("data:image/png;base64")])


SPEC = ModelSpec(4096, default_sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 20}, vocab_size=500)
SILENT = SamplingParams(100, temperature=0.7, top_p=0.9, top_k=20)


def sampling(**fields: object) -> SamplingParams:
    request = parse_chat_request({"messages": [{"role": "user", "content": "hi"}], **fields})
    return sampling_params(request, 100, SPEC)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SILENT),
        (
            {"max_tokens": 5, "temperature": 0, "seed": 3},
            replace(SILENT, max_tokens=5, temperature=0, seed=3),
        ),
        ({"max_tokens": 10**9}, SILENT),
        ({"top_k": -1, "top_p": 0.5}, replace(SILENT, top_k=0, top_p=0.5)),
        ({"logit_bias": {"7": -2.5}}, replace(SILENT, logit_bias={7: -2.5})),
        ({"logprobs": True}, replace(SILENT, top_logprobs=0)),
        ({"logprobs": True, "top_logprobs": 4}, replace(SILENT, top_logprobs=4)),
        ({"n": 3, "stop_token_ids": [4, 5]}, replace(SILENT, n=3, stop_token_ids=(4, 5))),
        ({"min_tokens": 10**9}, replace(SILENT, min_tokens=100)),
        (
            {"presence_penalty": 1, "frequency_penalty": -1},
            replace(SILENT, presence_penalty=1, frequency_penalty=-1),
        ),
        ({"min_p": 0.1, "repetition_penalty": 1.2}, replace(SILENT, min_p=0.1, repetition_penalty=1.2)),
    ],
)
def test_sampling_is_the_requests_then_the_checkpoints(
    fields: dict[str, object], expected: SamplingParams
) -> None:
    assert sampling(**fields) == expected


@pytest.mark.parametrize("fields", [{"logit_bias": {"500": 1}}, {"stop_token_ids": [3, 500]}])
def test_a_token_that_the_model_does_not_have(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="names token 500; the model has 500 tokens") as caught:
        sampling(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "token"}, "model"),
        ({"stop": ["token"]}, "stop[0]"),
        ({"cache_salt": "token"}, "cache_salt"),
    ],
)
def test_a_long_string_is_refused_in_a_field_for_short_ones(fields: dict[str, object], param: str) -> None:
    document = {"messages": [{"role": "user", "content": "hi"}], **fields}
    parse_chat_request(document, {})
    with pytest.raises(InvalidRequest, match="is too long") as caught:
        parse_chat_request(document, {"token": LongString((b"x",))})
    assert caught.value.param == param


def test_the_bytes_of_all_texts_are_counted() -> None:
    result = parsed(["é", image("https://h/1"), "b"], "cd")
    assert result.chat.num_text_bytes == 5


DEFAULTS = MediaOptions(sampling_rate=8000, num_frames=8)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, DEFAULTS),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, MediaOptions(8000, 4)),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, MediaOptions(8000, None)),
        ({"media_io_kwargs": {"video": {"fps": 2}}}, MediaOptions(8000, None, 2)),
        ({"media_io_kwargs": {"video": {"fps": 2, "num_frames": 5}}}, MediaOptions(8000, 5, 2)),
        ({"media_io_kwargs": {"video": {"fps": -1, "num_frames": 32}}}, MediaOptions(8000, 32)),
        ({"media_io_kwargs": {"video": {"max_duration": 3}}}, MediaOptions(8000, 8, max_duration=3)),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}}},
            MediaOptions(8000, 8, background=(1, 2, 3)),
        ),
    ],
)
def test_what_a_request_says_of_decoding_takes_the_place_of_defaults(
    fields: dict[str, object], expected: MediaOptions
) -> None:
    request = parse_chat_request({"messages": [{"role": "user", "content": "hi"}], **fields})
    assert media_options(request.media_io_kwargs, DEFAULTS) == expected


def test_a_request_may_say_otherwise_than_the_server() -> None:
    server = MediaIOKwargs.model_validate(
        {"image": {"rgba_background_color": [0, 0, 0]}, "video": {"fps": 1, "max_duration": 9}}
    )
    defaults = media_options(server, DEFAULTS)
    assert defaults == MediaOptions(8000, None, 1, 9, background=(0, 0, 0))
    own = MediaIOKwargs.model_validate(
        {"image": {"rgba_background_color": [1, 2, 3]}, "video": {"num_frames": 4}}
    )
    assert media_options(own, defaults) == MediaOptions(8000, 4, None, 9, background=(1, 2, 3))


def test_names_reach_the_template_and_count_as_text() -> None:
    result = parsed({"role": "user", "name": "Zoë", "content": "hi"}, {"role": "user", "content": "ho"})
    assert [message.get("name") for message in result.chat.messages] == ["Zoë", None]
    assert result.chat.num_text_bytes == len("Zoë".encode()) + 4


def test_settings_of_the_processor_travel_with_the_chat() -> None:
    kwargs = {"max_pixels": 1024, "do_pan_and_scan": False, "min_pixels": None, "fps": 2}
    request = parse_chat_request(
        {"messages": [{"role": "user", "content": "hi"}], "mm_processor_kwargs": kwargs}
    )
    assert parse_chat(request).settings == {"max_pixels": 1024, "do_pan_and_scan": False}


@pytest.mark.parametrize(
    ("io", "kwargs", "expected"),
    [
        ({}, {"fps": 1.5}, (None, 1.5)),
        ({}, {"num_frames": 7}, (7, None)),
        ({}, {"num_frames": 7, "fps": 1}, (7, 1)),
        ({"fps": 3}, {"num_frames": 7}, (None, 3)),
        ({"num_frames": -1}, {"num_frames": 7}, (None, None)),
        ({}, {"max_pixels": 100}, (8, None)),
    ],
)
def test_frames_are_chosen_by_either_field(
    io: dict[str, object], kwargs: dict[str, object], expected: tuple[int | None, float | None]
) -> None:
    request = parse_chat_request(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "media_io_kwargs": {"video": io},
            "mm_processor_kwargs": kwargs,
        }
    )
    options = media_options(request.media_io_kwargs, MediaOptions(num_frames=8), request.mm_processor_kwargs)
    assert (options.num_frames, options.fps) == expected
