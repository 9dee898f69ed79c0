"""The errors that a request can fail with. The tree is the table:

    ServingError                     500  a fault of the server
    ├── InvalidRequest               400  the request is wrong, or asks for something that is not supported
    │   └── PromptTooLong            400  more tokens than the model's context
    ├── Unauthorized                 401  no API key, or a wrong one
    ├── ModelNotFound                404  unknown model name
    ├── RequestTimeout               408  the body did not arrive in time
    ├── RequestTooLarge              413  the body is over the limit
    ├── UnsupportedEncoding          415  the body is compressed
    ├── InvalidMedia                 422  the item's bytes are not valid media
    │   ├── MediaTooLarge            413  the item is over a declared limit (bytes, pixels, seconds, frames)
    │   └── UnsupportedMedia         415  a format or modality that the server or the model does not support
    ├── UnknownUUID                  422  no item with this uuid is kept (any more); send it again
    ├── FetchRefused                 422  the URL policy forbids the URL, its host is unknown, or the host
    │                                     answered 4xx
    ├── FetchFailed                  502  the media host is unreachable, or answered 5xx
    ├── ArraysEvicted                409  between stages only: a cache no longer has an item's arrays
    ├── Overloaded                   503  a queue is full; try again
    ├── StageUnavailable             503  a replica died and a retry did not help, or the server is starting
    │   ├── ReplicaDied              503  the replica that worked on a call is gone
    │   └── ObjectLost               503  an array of a call is gone, with the process that held it
    └── StageTimeout                 504  the request's deadline passed

A message says what to change. `param` names the item (`messages[0].content[2]`). The code of a stage leaves
it out; the decorator of its endpoint fills it in. Messages contain no address, no path of the server and no
repr of an object. Arguments are positional and equal to those of `Exception`, so that the errors survive
pickling between processes.
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequest(ServingError):
    status = 400
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(ServingError):
    status = 401
    code = "invalid_api_key"


class ModelNotFound(ServingError):
    status = 404
    code = "model_not_found"


class RequestTimeout(ServingError):
    status = 408
    code = "request_timeout"


class RequestTooLarge(ServingError):
    status = 413
    code = "request_too_large"


class UnsupportedEncoding(ServingError):
    status = 415
    code = "unsupported_encoding"


class InvalidMedia(ServingError):
    status = 422
    code = "invalid_media"


class MediaTooLarge(InvalidMedia):
    status = 413
    code = "media_too_large"


class UnsupportedMedia(InvalidMedia):
    status = 415
    code = "unsupported_media"


class UnknownUUID(ServingError):
    status = 422
    code = "unknown_uuid"


class FetchRefused(ServingError):
    status = 422
    code = "fetch_refused"


class FetchFailed(ServingError):
    status = 502
    code = "fetch_failed"


class ArraysEvicted(ServingError):
    """Never reaches a client: the fan-out loads the item again, with its arrays."""

    status = 409
    code = "arrays_evicted"


class Overloaded(ServingError):
    status = 503
    code = "overloaded"


class StageUnavailable(ServingError):
    status = 503
    code = "stage_unavailable"


class ReplicaDied(StageUnavailable):
    """The replica that worked on a call is gone."""


class ObjectLost(StageUnavailable):
    """An array that a call refers to is gone, with the process that held it."""


class StageTimeout(ServingError):
    status = 504
    code = "timeout"
