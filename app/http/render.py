"""The answer of /v1/chat/completions/render: the model's input, without running the model."""

from __future__ import annotations

from app.fanout import PreparedItem
from app.http.timings import Timings, stage_timings
from app.openai.responses import JsonObject
from deployments.processor.placeholders import Span


def rendered(timings: Timings, model: str) -> JsonObject:
    prepared = timings.prepared
    items = zip(prepared.items, prepared.spans, strict=True)
    return {
        "object": "chat.render",
        "model": model,
        "prompt_token_ids": prepared.token_ids,
        "num_prompt_tokens": len(prepared.token_ids),
        "items": [_item(index, item, span) for index, (item, span) in enumerate(items)],
        "timings_ms": timings.to_json(),
    }


def _item(index: int, prepared: PreparedItem, span: Span) -> JsonObject:
    item, features, media = prepared.item, prepared.features, prepared.media
    rendered: JsonObject = {
        "index": index,
        "param": item.param,
        "modality": item.modality or "prompt",
        "digest": features.digest,
        "num_tokens": features.num_tokens,
        "placeholder": {"offset": span.offset, "length": span.length},
        "source": {"kind": item.kind, "bytes": prepared.num_bytes, "mime": prepared.mime},
        "media": media.info if media else {},
        "features": {
            name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in features.shapes.items()
        },
        "cached": (media and media.cached) or features.cached,
        "timings_ms": stage_timings(prepared.timings),
    }
    return rendered | ({"previews": media.previews} if media and media.previews else {})
