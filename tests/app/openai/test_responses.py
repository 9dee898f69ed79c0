from app.openai.responses import Usage
from deployments.types import Modality


def test_usage_counts_the_tokens_of_each_modality() -> None:
    usage = Usage(30, {Modality.IMAGE: 9, Modality.AUDIO: 10}, completion_tokens=5, cached_tokens=16)
    assert usage.to_json() == {
        "prompt_tokens": 30,
        "completion_tokens": 5,
        "total_tokens": 35,
        "prompt_tokens_details": {
            "text_tokens": 11,
            "image_tokens": 9,
            "audio_tokens": 10,
            "video_tokens": 0,
            "cached_tokens": 16,
        },
    }
