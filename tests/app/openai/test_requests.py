import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai import content, requests, validation
from app.openai.content import (
    AudioPart,
    EmbedsPart,
    ImagePart,
    InputAudioPart,
    RecalledPart,
    TextPart,
    VideoPart,
)
from app.openai.requests import NEUTRAL_VALUES, parse_chat_request
from deployments.errors import InvalidRequest
from tests.support.paths import ROOT


def chat(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def refusal(document: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(document)
    return caught.value


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "hi"}, TextPart(text="hi")),
        ("hi", TextPart(text="hi")),
        ({"text": "hi"}, TextPart(text="hi")),
        ({"type": "image_url", "image_url": {"url": "u"}}, ImagePart.model_validate({"image_url": "u"})),
        ({"image_url": "u"}, ImagePart.model_validate({"image_url": {"url": "u"}})),
        ({"type": "audio_url", "audio_url": "u"}, AudioPart.model_validate({"audio_url": "u"})),
        ({"type": "video_url", "video_url": {"url": "u"}}, VideoPart.model_validate({"video_url": "u"})),
        (
            {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "mp3"}},
            InputAudioPart.model_validate({"input_audio": {"data": "QQ==", "format": "mp3"}}),
        ),
    ],
)
def test_every_spelling_of_a_part(part: object, expected: object) -> None:
    assert parse_chat_request(chat([part])).messages[0].content == [expected]


@pytest.mark.parametrize("detail", [None, "low", "auto", "ultra", 7])
def test_detail_and_unknown_keys_are_ignored(detail: object) -> None:
    part = {"type": "image_url", "image_url": {"url": "u", "detail": detail, "x": 1}, "y": {}}
    assert parse_chat_request(chat([part])) == parse_chat_request(chat([{"image_url": "u"}]))


def test_null_is_absent_at_the_top() -> None:
    fields = (
        "model max_tokens max_completion_tokens temperature top_p stop seed n stream stream_options user"
        " tools logprobs response_format metadata store parallel_tool_calls"
    )
    nulls = dict.fromkeys(fields.split())
    assert parse_chat_request(chat("hi", **nulls)) == parse_chat_request(chat("hi"))


WRONG_GRIDS: list[object] = [[], ["1"], [True], [[1], [2]], [[[1]]], [1] * 65, {}, True, [2**31]]


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "banana", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        (chat(None), "messages[0].content"),
        (chat(7), "messages[0].content"),
        (chat(["a", 7]), "messages[0].content[1]"),
        (chat(["a", {"type": "banana"}]), "messages[0].content[1]"),
        (chat([{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (chat([{"type": "image_url", "image_url": None}]), "messages[0].content[0].image_url"),
        (chat([{"type": "image_url", "image_url": {"url": 7}}]), "messages[0].content[0].image_url.url"),
        (chat([{"input_audio": {"format": "wav"}}]), "messages[0].content[0].input_audio.data"),
        (chat([{"type": "text", "text": 7}]), "messages[0].content[0].text"),
        (chat("hi", temperature="0.5"), "temperature"),
        (chat("hi", temperature=2.5), "temperature"),
        (chat("hi", top_p=0), "top_p"),
        (chat("hi", max_tokens=0), "max_tokens"),
        (chat("hi", max_tokens=-1), "max_tokens"),
        (chat("hi", max_tokens=True), "max_tokens"),
        (chat("hi", max_completion_tokens=1.5), "max_completion_tokens"),
        (chat("hi", stop=["a"] * 5), "stop"),
        (chat("hi", stop=[""]), "stop[0]"),
        (chat("hi", stop=7), "stop"),
        (chat("hi", seed="1"), "seed"),
        (chat("hi", stream="true"), "stream"),
        (chat("hi", stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (chat("hi", user=7), "user"),
        (chat("hi", model=7), "model"),
        (chat("hi", n=0), "n"),
        (chat("hi", n=129), "n"),
        (chat("hi", n=True), "n"),
        (chat("hi", logprobs=1), "logprobs"),
        (chat("hi", logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat("hi", top_logprobs=2), "top_logprobs"),
        (chat("hi", presence_penalty=2.1), "presence_penalty"),
        (chat("hi", frequency_penalty=-2.1), "frequency_penalty"),
        (chat("hi", logit_bias={"1": 101}), "logit_bias.1"),
        (chat("hi", logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
        (chat("hi", top_k=-2), "top_k"),
        (chat("hi", min_p=1.1), "min_p"),
        (chat("hi", repetition_penalty=0), "repetition_penalty"),
        (chat("hi", min_tokens=-1), "min_tokens"),
        (chat("hi", min_tokens=9, max_tokens=8), "min_tokens"),
        (chat("hi", stop_token_ids=[-1]), "stop_token_ids[0]"),
        (chat("hi", tools=[{"type": "function"}]), "tools"),
        (chat("hi", response_format={"type": "json_object"}), "response_format"),
        (chat(["a", {"type": "image_url", "image_url": None, "uuid": ""}]), "messages[0].content[1].uuid"),
        (chat([{"type": "image_embeds", "uuid": "x"}]), "messages[0].content[0]"),
        (chat([{"type": "image_url", "image_url": "http://h", "uuid": 7}]), "messages[0].content[0].uuid"),
        (chat([{"image_url": "http://h", "uuid": "x" * 257}]), "messages[0].content[0].uuid"),
        (chat([{"type": "image_embeds"}]), "messages[0].content[0]"),
        (chat([{"type": "image_embeds", "image_embeds": 7}]), "messages[0].content[0]"),
        (chat([{"type": "image_embeds", "image_embeds": {}}]), "messages[0].content[0]"),
        (chat([{"image_embeds": {"image_embeds": [1.0]}}]), "messages[0].content[0]"),
        (chat([{"type": "prompt_embeds", "data": ["QQ=="]}]), "messages[0].content[0]"),
        *(
            (
                chat([{"image_embeds": {"image_embeds": "QQ==", "image_grid_thw": grid}}]),
                "messages[0].content[0]",
            )
            for grid in WRONG_GRIDS
        ),
    ],
)
def test_a_wrong_field_is_named(document: object, param: str) -> None:
    error = refusal(document)
    assert error.param == param
    assert error.status == 400
    assert len(error.message) > 10


@pytest.mark.parametrize("document", [[], "hi", 7, None])
def test_a_body_that_is_no_object(document: object) -> None:
    assert refusal(document).message == "The body must be a JSON object."


def test_the_uuid_of_embeddings_alone_asks_for_them() -> None:
    part = {"type": "audio_embeds", "audio_embeds": None, "uuid": "x"}
    assert "audio_embeds is missing: embeddings are not kept by their uuid" in refusal(chat([part])).message


def test_media_may_be_named_alone() -> None:
    parts = [
        {"type": "image_url", "image_url": None, "uuid": "x"},
        {"type": "input_audio", "uuid": "y"},
        {"video_url": None, "uuid": "z"},
    ]
    named = parse_chat_request(chat(parts)).messages[0].content
    assert isinstance(named, list)
    recalled = [part for part in named if isinstance(part, RecalledPart)]
    assert len(recalled) == len(named)
    assert [(part.modality, part.uuid) for part in recalled] == [
        ("image", "x"),
        ("audio", "y"),
        ("video", "z"),
    ]


@pytest.mark.parametrize(
    ("part", "modality", "tensors"),
    [
        ({"type": "image_embeds", "image_embeds": "QQ=="}, "image", {"image_embeds": "QQ=="}),
        ({"audio_embeds": {"audio_embeds": "QQ==", "x": None}}, "audio", {"audio_embeds": "QQ=="}),
        ({"type": "prompt_embeds", "data": "QQ=="}, "prompt", {"prompt_embeds": "QQ=="}),
        ({"type": "prompt_embeds", "prompt_embeds": "QQ=="}, "prompt", {"prompt_embeds": "QQ=="}),
        ({"prompt_embeds": {"data": "QQ=="}}, "prompt", {"prompt_embeds": "QQ=="}),
        (
            {
                "video_embeds": {
                    "second_per_grid_ts": 0.5,
                    "video_grid_thw": [[2, 4, 4]],
                    "video_embeds": "QQ==",
                }
            },
            "video",
            {"second_per_grid_ts": [0.5], "video_grid_thw": [2, 4, 4], "video_embeds": "QQ=="},
        ),
    ],
)
def test_embeddings_in_each_of_their_forms(
    part: dict[str, object], modality: str, tensors: dict[str, object]
) -> None:
    content = parse_chat_request(chat([{**part, "uuid": "u"}])).messages[0].content
    assert isinstance(content, list)
    (parsed,) = content
    assert isinstance(parsed, EmbedsPart)
    assert (parsed.modality, parsed.tensors, parsed.uuid) == (modality, tensors, "u")
    assert list(parsed.tensors) == list(tensors)


@pytest.mark.parametrize("content", [None, "", []])
def test_an_assistant_may_be_silent(content: object) -> None:
    document = {"messages": [{"role": "assistant", "content": content}, {"role": "user", "content": "hi"}]}
    assert parse_chat_request(document).messages[0].content in ("", [])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
    ],
)
def test_the_smaller_token_limit_holds(limits: dict[str, int], expected: int | None) -> None:
    assert parse_chat_request(chat("hi", **limits)).token_limit() == expected


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"vidoe": {}}, "media_io_kwargs.vidoe"),
        ({"video": {"frames": 8}}, "media_io_kwargs.video.frames"),
        ({"video": {"num_frames": 0}}, "media_io_kwargs.video.num_frames"),
        ({"video": {"fps": -0.5}}, "media_io_kwargs.video.fps"),
        ({"video": {"max_duration": 0}}, "media_io_kwargs.video.max_duration"),
        ({"image": {"image_mode": "L"}}, "media_io_kwargs.image.image_mode"),
        ({"image": {"rgba_background_color": [0, 0]}}, "media_io_kwargs.image.rgba_background_color"),
        ({"image": {"rgba_background_color": [0, 0, 256]}}, "media_io_kwargs.image.rgba_background_color[2]"),
        ({"audio": {"x": 1}}, "media_io_kwargs.audio.x"),
    ],
)
def test_wrong_settings_of_decoding_are_named(kwargs: object, param: str) -> None:
    assert refusal(chat("hi", media_io_kwargs=kwargs)).param == param


@pytest.mark.parametrize("kind", [0, {}, ["text"], "", "banana"])
def test_a_type_that_is_no_type_is_refused(kind: object) -> None:
    assert refusal(chat([{"type": kind, "text": "hi"}])).param == "messages[0].content[0]"


@pytest.mark.parametrize("field", NEUTRAL_VALUES)
def test_what_would_change_the_answer_is_refused_by_name(field: str) -> None:
    error = refusal(chat("hi", **{field: {"some": 1}}))
    assert error.param == field
    assert error.message.startswith(f"{field} is not supported here")
    for neutral in (*NEUTRAL_VALUES[field], None):
        assert parse_chat_request(chat("hi", **{field: neutral})) == parse_chat_request(chat("hi"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_choice", "required"), ("best_of", 2), ("best_of", True), ("echo", 0), ("prompt_logprobs", 0)],
)
def test_what_only_looks_neutral_is_refused(field: str, value: object) -> None:
    assert refusal(chat("hi", **{field: value})).param == field


def test_calls_of_tools_in_the_conversation_are_refused() -> None:
    silent = {"role": "assistant", "content": None}
    error = refusal({"messages": [silent, {**silent, "tool_calls": [{}]}]})
    assert error.param == "messages[1].tool_calls"
    assert parse_chat_request({"messages": [{**silent, "tool_calls": []}]}).messages[0].content == ""


def test_what_changes_no_answer_is_ignored() -> None:
    harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "priority": 3}
    harmless |= {"parallel_tool_calls": False, "request_id": "x", "prediction": {}, "safety_identifier": "y"}
    request = parse_chat_request(chat("hi", **harmless))
    assert request == parse_chat_request(chat("hi", user="me"))


def test_the_docs_have_the_table_of_unsupported_fields() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    table = page.partition("| refused | unless |\n| -- | -- |\n")[2].partition("\n\n")[0]
    shown: dict[str, list[object]] = {}
    for row in table.splitlines():
        fields, values = row.strip("|").split("|")
        only = [json.loads(value) for value in re.findall("`(.+?)`", values)]
        shown |= dict.fromkeys(re.findall("`(.+?)`", fields), only)
    assert shown == {field: list(values) for field, values in NEUTRAL_VALUES.items()}


def test_a_biased_token_is_a_number() -> None:
    assert (refusal(chat("hi", logit_bias={"a": 1})).param or "").startswith("logit_bias.a")
    assert parse_chat_request(chat("hi", logit_bias={"7": -1})).logit_bias == {"7": -1}


def test_the_number_of_parts_is_bounded() -> None:
    assert "limit is 8192" in refusal(chat(["a"] * 8192)).message


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": 1.5}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": "9"}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": True}, "mm_processor_kwargs.max_pixels"),
        ({"do_pan_and_scan": 1}, "mm_processor_kwargs.do_pan_and_scan"),
        ({"fps": 0}, "mm_processor_kwargs.fps"),
        ({"fps": 1e9}, "mm_processor_kwargs.fps"),
        ({"num_frames": 0}, "mm_processor_kwargs.num_frames"),
        ([], "mm_processor_kwargs"),
    ],
)
def test_wrong_settings_of_the_processor_are_named(kwargs: object, param: str) -> None:
    assert refusal(chat("hi", mm_processor_kwargs=kwargs)).param == param


@pytest.mark.parametrize("name", ["do_resize", "size", "patch_size", "images_kwargs", "x" * 1000])
def test_unknown_settings_of_the_processor_are_refused_with_those_allowed(name: str) -> None:
    error = refusal(chat("hi", mm_processor_kwargs={name: 1}))
    assert error.param == f"mm_processor_kwargs.{name[:64]}"
    assert "allowed are crop_to_patches, do_image_splitting, do_pan_and_scan" in error.message
    assert parse_chat_request(chat("hi", mm_processor_kwargs={name: None})) == parse_chat_request(chat("hi"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
WHOLE = chat(
    [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": "u"}, "uuid": "a"},
        {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
        {"type": "image_embeds", "image_embeds": {"image_embeds": "QQ==", "image_grid_thw": [1, 2, 2]}},
        {"type": "video_url", "video_url": None, "uuid": "b"},
    ],
    **{name: None for name in requests.ChatRequest.model_fields if name not in ("messages", "previews")},
    **dict.fromkeys(NEUTRAL_VALUES),
) | {
    "logit_bias": {"1": 1},
    "stop": ["x"],
    "stop_token_ids": [1],
    "stream_options": {"include_usage": True},
    "media_io_kwargs": {"video": {"fps": 1.0}, "image": {"rgba_background_color": [0, 0, 0]}},
    "mm_processor_kwargs": {"max_pixels": 9, "fps": 1.0},
}
NAMES = vars(content) | vars(requests) | vars(validation)
FOREIGN = re.compile(
    r"pydantic|Input should|instance of|Value error|Assertion|is not valid|"
    + "|".join(rf"\b{name}\b" for name, value in NAMES.items() if isinstance(value, type))
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def with_at(document: object, place: tuple[str | int, ...], value: object) -> object:
    if not place:
        return value
    copy = orjson.loads(orjson.dumps(document))
    spot = copy
    for step in place[:-1]:
        spot = spot[step]
    spot[place[-1]] = value
    return copy


@given(place=st.sampled_from(places(WHOLE)), value=JSON)
def test_no_error_speaks_of_how_it_was_found(place: tuple[str | int, ...], value: object) -> None:
    told = ""
    try:
        parse_chat_request(with_at(WHOLE, place, value))
    except InvalidRequest as error:
        told = error.message.removeprefix(error.param or "")
    assert not FOREIGN.search(told)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 10**30}, "max_tokens: must be an integer, of at most 64 bits and without a decimal"),
        ({"seed": 2**64}, "seed: must be"),
        ({"top_k": "5"}, "top_k: must be an integer"),
        ({"temperature": 3}, "temperature: must be at most 2.0"),
        ({"temperature": "warm"}, "temperature: must be a number"),
        ({"stream_options": 5}, "stream_options: must be an object"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: must be true or false"),
        ({"stop": ["a"] * 5}, "stop: must have at most 4 entries"),
        ({"messages": "hi"}, "messages: must be a list"),
        ({"messages": []}, "messages: must have at least 1 entries"),
        ({"messages": [5]}, "messages[0]: must be an object"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role: must be 'system', 'developer'"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps: must be greater than 0, or"),
        ({"media_io_kwargs": {"speed": 1}}, "media_io_kwargs.speed: is not known here"),
    ],
)
def test_an_error_says_what_to_change(fields: dict[str, object], message: str) -> None:
    body = json.dumps(chat("hi") | fields)
    assert refusal(orjson.loads(body)).message.startswith(message)
