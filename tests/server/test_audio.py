"""Audio: sample rates, channels, sound tracks of videos and long silence."""

from __future__ import annotations

import base64
import io
from fractions import Fraction

import numpy as np
import pytest
import soundfile

from tests.support.cluster import Server
from tests.support.media_files import clip, sound, tone
from tests.support.requests import data_uri, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

TENTH = Fraction(1, 10)


def test_stereo_at_another_rate_becomes_mono_at_16_khz(server: Server) -> None:
    files = [
        sound(2, 48000, 1),
        sound(2, 48000, 2),
        sound(2, 96000, 2),
        sound(2, 44100, 2),
        sound(2, 48000, 6, "FLAC"),
    ]
    parts = [media("audio", data_uri("audio/wav", data)) for data in files]
    items = server.render(*parts, previews=True)["items"]
    for item in items:
        assert item["media"]["num_samples"] == 2 * 16000
        assert item["media"]["duration_s"] == pytest.approx(2)
        assert abs(item["num_tokens"] - items[0]["num_tokens"]) <= 1
        heard, rate = soundfile.read(io.BytesIO(base64.b64decode(item["previews"][0].partition(",")[2])))
        assert rate == 16000
        assert np.abs(heard - tone(2, 16000, 1)[:, 0])[800:-800].max() < 0.01
    answers = [server.ask(part).body["choices"][0]["message"]["content"] for part in parts[:2]]
    assert answers[0] == answers[1]


def test_a_video_without_sound_is_refused_only_as_audio(server: Server) -> None:
    silent, loud = (
        data_uri("video/mp4", clip(range(20), time_base=TENTH)),
        data_uri("video/mp4", clip(range(20), time_base=TENTH, audio=tone(2))),
    )
    assert server.ask(media("video", silent)).status == 200
    assert server.ask(media("video", silent), media("video", loud)).status == 200
    assert server.render(media("audio", loud))["items"][0]["media"]["duration_s"] > 1.9
    for content in ([media("audio", loud), media("audio", silent)], ["listen", media("audio", silent)]):
        assert "not have a sound track" in server.ask(*content).refusal("messages[0].content[1]")


def test_a_small_file_of_long_silence_is_decoded(server: Server) -> None:
    file = io.BytesIO()
    soundfile.write(file, [0.0] * (29 * 16000), 16000, format="FLAC")
    (item,) = server.render(media("audio", data_uri("audio/flac", file.getvalue())))["items"]
    assert item["media"]["duration_s"] == 29
    assert item["num_tokens"] > 0
