"""Reads base64 of a torch.save, safetensors or npy file of embeddings into a verified array.

The few numbers that a model may need with them, such as the grid of an image, come in the same formats.

Nothing is ever unpickled. The pickle in a torch file is read as data. Only the form that torch.save writes
for a plain tensor is accepted: a call of `_rebuild_tensor_v2` on a named record of the archive. So no code
can run and torch is not needed. The array is a view of the decoded file, so no further memory is used.

One reader for each format returns what the file declares. The checks on it are the same for all formats.
The safetensors package is not used, because it cannot read the header alone: `deserialize` copies the values.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import pickletools
import struct
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt
import orjson
from blake3 import blake3

from deployments.errors import InvalidMedia, MediaTooLarge, StageTimeout
from deployments.media import base64_stream as base64
from deployments.media.base64_stream import Piece

DTYPES = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}  # numpy has no bfloat16
NUMBER_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32, "float64": np.float64}

_MAX_HEADER = 64 * 1024  # bytes that describe the tensor; one tensor needs far fewer
_MAX_DIRECTORY = 128 * 1024  # bytes of a zip's directory
_MAX_NUMBERS = 64
_MAX_NUMBERS_FILE = 64 * 1024  # bytes
_CHECKED = 2**16  # values checked at once; they and their masks fit a core's cache
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}


@dataclass(frozen=True, slots=True)
class Embeds:
    """One verified embedding. bfloat16 values are kept as their bits, in uint16."""

    values: npt.NDArray[Any]  # [num_tokens, hidden_size], a view of the decoded file
    dtype: str  # a key of DTYPES
    digest: str  # hex BLAKE3 over dtype, shape and values; equal for all file formats


@dataclass(frozen=True, slots=True)
class _Declared:
    """A file's declaration of its one tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None is C order
    start: int  # of the tensor's bytes in the file
    end: int  # of the bytes in the file that may belong to it


def load_embeds(
    encoded: Sequence[Piece],
    *,
    max_bytes: int,
    hidden_size: int | None,
    stopped: threading.Event,
    check_finite: bool = True,
) -> Embeds:
    """Reads base64 text of a file of up to `max_bytes`; `hidden_size` is the model's, or None if unknown.

    Raises MediaTooLarge before it decodes, InvalidMedia with the reason, StageTimeout if `stopped` is set.
    """
    data = _decode(encoded, max_bytes, stopped)
    declared = _reader(data)(data)
    values = _verified(data, declared, hidden_size)
    if check_finite:
        _check_finite(declared.dtype, values)
    return Embeds(values, declared.dtype, _digest(declared.dtype, values))


def load_numbers(encoded: Sequence[Piece], stopped: threading.Event) -> npt.NDArray[Any]:
    """Returns up to 64 integers or floats, flat. Raises the same errors as `load_embeds`."""
    data = _decode(encoded, _MAX_NUMBERS_FILE, stopped)
    declared = _reader(data)(data)
    if declared.dtype not in NUMBER_DTYPES:
        raise InvalidMedia(f"Its dtype is {declared.dtype}; it must be one of {', '.join(NUMBER_DTYPES)}.")
    if not 1 <= math.prod(declared.shape) <= _MAX_NUMBERS:
        raise InvalidMedia(f"Its shape is {_text(declared.shape)}; it must have 1 to {_MAX_NUMBERS} numbers.")
    return _contiguous(data, declared, np.dtype(NUMBER_DTYPES[declared.dtype])).copy()


def _decode(encoded: Sequence[Piece], max_bytes: int, stopped: threading.Event) -> mmap.mmap:
    num_chars = sum(piece.size for piece in encoded)
    end = b"".join(piece[-2:].tobytes() for piece in encoded[-2:])[-2:]
    size = num_chars // 4 * 3 - end.count(b"=")
    if size > max_bytes:
        raise MediaTooLarge(f"The embedding has {size} bytes; the limit is {max_bytes}. Send fewer tokens.")
    if size <= 0 or num_chars % 4:
        raise InvalidMedia("The embedding is not valid base64: its length must be a multiple of 4.")
    data = _memory(size)
    try:
        for part in base64.decode(encoded):
            if stopped.is_set():
                raise StageTimeout("The request ended while its embedding was decoded. Try again later.")
            data.write(part)
    except ValueError:  # from the decoder, and from `write` if more came out than fits
        raise InvalidMedia(
            "The embedding is not valid base64. Send it without line breaks and with padding only at its end."
        ) from None
    return data


def _memory(size: int) -> mmap.mmap:
    """Returns zeroed memory. Huge pages are used if possible: small ones cost more than decoding base64."""
    data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        data.madvise(mmap.MADV_HUGEPAGE)
    return data


def _reader(data: mmap.mmap) -> Callable[[mmap.mmap], _Declared]:
    head = data[:9]
    if head.startswith(b"PK\x03\x04"):
        return _read_torch
    if head.startswith(b"\x93NUMPY"):
        return _read_npy
    if head[8:] == b"{":
        return _read_safetensors
    raise InvalidMedia(
        "The embedding is not in a known format: send the bytes of torch.save (its zip format, the default"
        " since 1.6; other pickles are never loaded), safetensors or npy."
    )


def _verified(data: mmap.mmap, declared: _Declared, hidden_size: int | None) -> npt.NDArray[Any]:
    shape = declared.shape
    if declared.dtype not in DTYPES:
        raise InvalidMedia(
            f"The embedding's dtype is {declared.dtype}; it must be one of {', '.join(DTYPES)}."
        )
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
        raise InvalidMedia(f"The embedding's shape is {_text(shape)}; it must be (tokens, hidden size).")
    num_tokens, width = shape[-2:]
    if num_tokens < 1 or width < 1:
        raise InvalidMedia(f"The embedding's shape is {_text(shape)}; it has no tokens.")
    if hidden_size is not None and width != hidden_size:
        raise InvalidMedia(f"The embedding's hidden size is {width}; the model's is {hidden_size}.")
    return _contiguous(data, declared, np.dtype(DTYPES[declared.dtype])).reshape(num_tokens, width)


def _contiguous(data: mmap.mmap, declared: _Declared, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns the values as a flat view of the file."""
    shape = declared.shape
    if declared.strides is not None and not _is_contiguous(shape, declared.strides):
        raise InvalidMedia(
            "The embedding's strides are not those of a contiguous tensor. Save its .contiguous()."
        )
    size = math.prod(shape)
    end = declared.start + size * dtype.itemsize
    missing = max(end - declared.end, declared.end - len(data))
    if missing > 0:
        raise InvalidMedia(
            f"The embedding is truncated: {missing} bytes are missing for its shape {_text(shape)}."
        )
    return np.frombuffer(data, dtype, size, declared.start)


def _check_finite(dtype: str, values: npt.NDArray[Any]) -> None:
    """Raises InvalidMedia for NaN and infinity. Works in steps, since a mask of all values is large."""
    # All bits of the exponent are set in NaN and infinity only.
    exponent = np.array(_EXPONENTS[dtype]).astype(f"u{values.itemsize}")
    bits = values.reshape(-1).view(exponent.dtype)
    for start in range(0, len(bits), _CHECKED):
        finite = bits[start : start + _CHECKED] & exponent != exponent
        if not finite.all():
            token, column = divmod(start + int(finite.argmin()), values.shape[1])
            raise InvalidMedia(
                f"The embedding's value at [{token}, {column}] is not finite. Remove NaN and infinity."
            )


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return all(n == 1 or s == e for n, s, e in zip(shape, strides, expected, strict=True))


def _text(shape: tuple[int, ...]) -> str:
    return str(shape) if len(shape) <= 8 else f"of {len(shape)} dimensions"


def _digest(dtype: str, values: npt.NDArray[Any]) -> str:
    header = f"{dtype} {values.shape[0]} {values.shape[1]}\n".encode()
    return blake3(header).update(values.reshape(-1).view(np.uint8).data).hexdigest()


# npy


def _read_npy(data: mmap.mmap) -> _Declared:
    file = io.BytesIO(data[:_MAX_HEADER])  # numpy copies as much as the header declares, so it gets no more
    try:
        is_first_version = npy.read_magic(file) == (1, 0)
        read_header = npy.read_array_header_1_0 if is_first_version else npy.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)  # refuses headers over 10 kB
        is_valid = _are_sizes(shape)
    except Exception:  # noqa: BLE001
        # numpy evaluates the header as a Python literal: hostile ones raise anything.
        is_valid = False
    if not is_valid:
        raise InvalidMedia("The embedding's npy header is damaged. Write the array with numpy.save.")
    if is_fortran:
        raise InvalidMedia("The embedding is in Fortran order; save numpy.ascontiguousarray of it.")
    name = dtype.name if dtype.str.startswith("<") else dtype.str
    return _Declared(name, shape, None, file.tell(), len(data))


# safetensors

_SAFETENSORS_DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
}


def _read_safetensors(data: mmap.mmap) -> _Declared:
    start = 8 + _header_length(data[:8])
    try:
        header = orjson.loads(data[8:start])
    except orjson.JSONDecodeError:
        raise InvalidMedia(
            "The embedding's safetensors header is not valid JSON. Save the file again."
        ) from None
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    match tensors:
        case [{"dtype": str(dtype), "shape": [*shape], "data_offsets": [0, int(size)]}] if _are_sizes(shape):
            name = _SAFETENSORS_DTYPES.get(dtype, dtype[:16])
            return _Declared(name, tuple(shape), None, start, start + size)
        case [_]:
            raise InvalidMedia(
                "The embedding's safetensors header does not describe a tensor. Save the file again."
            )
    raise InvalidMedia(f"The embedding's safetensors file holds {len(tensors)} tensors; it must hold one.")


def _header_length(field: bytes) -> int:
    if len(field) != 8:
        raise InvalidMedia("The embedding is truncated: its header is not complete. Send the whole file.")
    length = int.from_bytes(field, "little")
    if length > _MAX_HEADER:
        raise InvalidMedia(
            f"The embedding's header has {length} bytes; the limit is {_MAX_HEADER}. Remove its metadata."
        )
    return length


def _are_sizes(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value < 2**48 for value in values)


# torch.save

_TORCH_DTYPES = {
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
# Functions in a pickle that show which other kind of object was saved.
_NOT_PLAIN = {
    "torch._utils _rebuild_tensor_v3": f"a tensor whose dtype is none of {', '.join(DTYPES)}",
    "torch._utils _rebuild_sparse_tensor": "a sparse tensor; save its .to_dense()",
    "torch._utils _rebuild_sparse_csr_tensor": "a sparse tensor; save its .to_dense()",
    "torch._utils _rebuild_nested_tensor": "a nested tensor",
    "torch._utils _rebuild_qtensor": "a quantized tensor; save its .dequantize()",
    "torch._utils _rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "torch._utils _rebuild_parameter": "a Parameter; save its .detach()",
}
_COLLECTIONS = {"EMPTY_DICT": "a dict", "EMPTY_LIST": "a list"}
_NUMBERS_AND_TEXT = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}


@dataclass(frozen=True, slots=True)
class _Global:
    """A name in the pickle. It is never imported."""

    name: str  # "module name"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A reference to a record of the archive."""

    id: object  # ("storage", type, key of the record, device, number of elements)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the pickle asks for. It is never made."""

    function: object
    args: object


def _read_torch(data: mmap.mmap) -> _Declared:
    records = _records(data)
    if "constants.pkl" in records:
        raise InvalidMedia("The embedding is a TorchScript archive. Send torch.save of a tensor.")
    if "data.pkl" not in records:
        raise InvalidMedia(
            "The embedding is a zip archive, but not one of torch.save. Send torch.save of a tensor."
        )
    if "byteorder" in records and _small(data, *records["byteorder"]) != b"little":
        raise InvalidMedia("The embedding was saved on a big-endian machine. Save it on a little-endian one.")
    match _unpickled(_small(data, *records["data.pkl"])):
        case _Call(
            _Global("torch._utils _rebuild_tensor_v2"),
            (
                _Stored(("storage", _Global(storage), str(key), str(), int())),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                _Call(_Global("collections OrderedDict"), ()),
            ),
        ) if offset >= 0 and _are_sizes(shape):
            return _declared(records, storage, f"data/{key}", offset, shape, strides)
    raise _not_a_plain_tensor()


def _declared(
    records: dict[str, tuple[int, int]],
    storage: str,
    record: str,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> _Declared:
    dtype = _TORCH_DTYPES.get(storage.removeprefix("torch "), "not known here")
    if record not in records:
        raise InvalidMedia(
            "The embedding is truncated: its archive lacks the record of its values. Send the whole file."
        )
    start, end = records[record]
    itemsize = np.dtype(DTYPES.get(dtype, np.uint8)).itemsize
    return _Declared(dtype, shape, strides, start + offset * itemsize, end)


def _unpickled(pickle: bytes) -> object:
    """Returns the pickle's one object as data: names are not imported, and calls are recorded, not made."""
    try:
        return _replayed(pickle)
    except (ValueError, IndexError, KeyError, TypeError):
        raise InvalidMedia("The embedding's pickle is damaged. Send torch.save of a tensor.") from None


def _replayed(pickle: bytes) -> object:
    """Runs the pickle's stack machine on plain data.

    The opcodes below are all that torch.save writes for a plain tensor (pickle protocol 2). A call of
    `_rebuild_tensor_v2` (GLOBAL, REDUCE) takes the storage (BINPERSID of a tuple), offset, shape and strides
    (numbers in tuples), requires_grad (NEWTRUE, NEWFALSE) and an empty OrderedDict of hooks. BINPUT and
    BINGET share repeated values. Any other opcode means that something else was saved.
    """
    stack: list[object] = []
    marks: list[int] = []  # stack heights at which MARK began a TUPLE
    memo: dict[object, object] = {}
    for opcode, arg, _ in pickletools.genops(pickle):
        match opcode.name:
            case "PROTO":
                pass
            case "GLOBAL":
                stack.append(_Global(_plain(str(arg))))
            case name if name in _NUMBERS_AND_TEXT:
                stack.append(arg)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                first = len(stack) - int(opcode.name[-1])
                stack[first:] = [tuple(stack[first:])]
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                first = marks.pop()
                stack[first:] = [tuple(stack[first:])]
            case "BINPERSID":
                stack.append(_Stored(stack.pop()))
            case "REDUCE":
                args = stack.pop()
                stack.append(_Call(stack.pop(), args))
            case "BINPUT":
                memo[arg] = stack[-1]
            case "BINGET":
                stack.append(memo[arg])
            case "STOP":
                return stack.pop()
            case name:
                raise _not_a_plain_tensor(_COLLECTIONS.get(name))
    raise AssertionError("genops ends with STOP or raises")


def _plain(name: str) -> str:
    if name in _NOT_PLAIN:
        raise _not_a_plain_tensor(_NOT_PLAIN[name])
    return name


def _not_a_plain_tensor(but: str | None = None) -> InvalidMedia:
    return InvalidMedia(
        f"The embedding is not torch.save of one plain tensor{f', but of {but}' if but else ''}."
    )


def _records(data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Maps each name, without the archive's folder, to the begin and end of the record's bytes."""
    try:
        with zipfile.ZipFile(_Directory(data)) as archive:  # type: ignore[call-overload]
            entries: list[zipfile.ZipInfo] = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error):
        raise InvalidMedia(
            "The embedding's zip archive is truncated or damaged. Send the whole file."
        ) from None
    records = {entry.filename.partition("/")[2]: entry for entry in entries}
    compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if compressed and "constants.pkl" not in records:
        raise InvalidMedia(
            "The embedding's zip archive is compressed. Send the file as torch.save writes it."
        )
    return {name: _extent(data, entry) for name, entry in records.items()}


def _extent(data: mmap.mmap, entry: zipfile.ZipInfo) -> tuple[int, int]:
    offset = entry.header_offset  # negative if the archive's own offsets are wrong
    header = data[offset : offset + 30] if offset >= 0 else b""
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        raise InvalidMedia("The embedding's zip archive is truncated or damaged. Send the whole file.")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    start = offset + 30 + name_length + extra_length
    return start, start + entry.file_size


def _small(data: mmap.mmap, start: int, end: int) -> bytes:
    if end - start > _MAX_HEADER:
        raise InvalidMedia(
            "The embedding's archive has a description larger than a plain tensor's. Save one tensor."
        )
    return data[start:end]


class _Directory:
    """A file for zipfile that refuses to read a directory larger than that of any tensor."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.seek = data.seek
        self.tell = data.tell

    def read(self, size: int = -1) -> bytes:
        left = len(self._data) - self._data.tell()
        if (left if size < 0 else size) > _MAX_DIRECTORY:
            raise zipfile.BadZipFile
        return self._data.read(size)
