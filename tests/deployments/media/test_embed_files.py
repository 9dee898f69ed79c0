from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge, StageTimeout
from deployments.media import base64_stream
from deployments.media.embed_files import Embeds, load_embeds
from tests.support.corpus import embedding_files
from tests.support.paths import CORPUS

TENSOR = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7


def load(data: bytes, *, max_bytes: int = 2**20, hidden_size: int | None = None) -> Embeds:
    return load_text(base64.b64encode(data), max_bytes=max_bytes, hidden_size=hidden_size)


def load_text(
    text: bytes, *, max_bytes: int = 2**20, hidden_size: int | None = None, stopped: bool = False
) -> Embeds:
    event = threading.Event()
    if stopped:
        event.set()
    encoded = np.frombuffer(text, np.uint8)
    return load_embeds([encoded], max_bytes=max_bytes, hidden_size=hidden_size, stopped=event)


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def npy_file(array: np.ndarray[Any, Any], version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def npy_header(text: bytes) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def safetensors_file(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def rezipped(
    data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED
) -> bytes:
    """Returns the archive with each record changed, or left out if `change` returns None."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", method) as new:
        for name in old.namelist():
            record = change(name.partition("/")[2], old.read(name))
            if record is not None:
                new.writestr(name, record)
    return file.getvalue()


def with_pickle(old: bytes, new: bytes) -> bytes:
    """Returns a torch file in whose pickle one piece is replaced."""

    def change(name: str, record: bytes) -> bytes:
        assert name != "data.pkl" or record.count(old) == 1
        return record.replace(old, new) if name == "data.pkl" else record

    return rezipped(torch_file(TENSOR), change)


def as_torch(result: Embeds) -> torch.Tensor:
    values = torch.from_numpy(result.values.copy())
    return values.view(torch.bfloat16) if result.dtype == "bfloat16" else values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "written", [torch_file, lambda t: safetensors.torch.save({"x": t})], ids=["torch", "safetensors"]
)
def test_values_arrive_bit_for_bit(dtype: torch.dtype, written: Callable[[torch.Tensor], bytes]) -> None:
    tensor = TENSOR.to(dtype)
    result = load(written(tensor), hidden_size=4)
    assert torch.equal(as_torch(result), tensor)
    assert result.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_values_arrive_bit_for_bit(dtype: type, version: tuple[int, int]) -> None:
    array: npt.NDArray[Any] = TENSOR.numpy().astype(dtype)
    result = load(npy_file(array, version))
    assert np.array_equal(result.values, array)
    assert result.dtype == np.dtype(dtype).name


def test_the_digest_depends_on_the_content_and_not_on_the_format() -> None:
    digests = {load(data).digest for data in (torch_file(TENSOR), npy_file(TENSOR.numpy()))}
    assert len(digests) == 1
    others = [TENSOR + 1, TENSOR.reshape(4, 3), TENSOR.half()]
    assert len(digests | {load(torch_file(other)).digest for other in others}) == 4


def test_plain_tensors_of_torch_save_are_read() -> None:
    for tensor in (TENSOR[1:], TENSOR.clone().requires_grad_(), TENSOR[None], TENSOR[:1].t().t()):
        result = load(torch_file(tensor))
        assert torch.equal(as_torch(result), tensor.detach().reshape(-1, 4))


def test_an_archive_of_two_thousand_tokens_spans_several_base64_segments() -> None:
    tensor = torch.randn(2000, 256)
    assert torch.equal(as_torch(load(torch_file(tensor), max_bytes=2**22)), tensor)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (TENSOR[0], r"shape is \(4,\)"),
        (TENSOR.reshape(1, 1, 3, 4), "shape is"),
        (TENSOR.reshape(3, 2, 2), "shape is"),
        (torch.zeros(0, 4), "no tokens"),
        (torch.zeros(4, 0), "no tokens"),
        (TENSOR.double(), "dtype is float64"),
        (TENSOR.long(), "dtype is int64"),
        (TENSOR.bool(), "dtype is bool"),
        (TENSOR.to(torch.complex64), "dtype is complex64"),
        (TENSOR.to(torch.float8_e4m3fn), "dtype is none of"),
        (TENSOR.t(), "strides"),
        (TENSOR[:, :2], "strides"),
        (torch.zeros(1).expand(500_000, 2048), "strides"),
        (TENSOR.to_sparse(), "sparse"),
        (torch.empty(3, 4, device="meta"), "meta"),
        (torch.nn.Parameter(TENSOR), "Parameter"),
        ([TENSOR], "a list"),
        ({"image_embeds": TENSOR}, "a dict"),
        ("text", "not torch.save of one plain tensor"),
        (torch._neg_view(TENSOR), "not torch.save of one plain tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_tensors_and_objects_are_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        load(torch_file(value))


def test_quantized_and_csr_tensors_are_refused_by_the_name_in_the_pickle() -> None:
    for name, reason in (("_rebuild_qtensor", "quantized"), ("_rebuild_sparse_csr_tensor", "sparse")):
        with pytest.raises(InvalidMedia, match=reason):
            load(with_pickle(b"_rebuild_tensor_v2", name.encode()))


def test_a_wrong_hidden_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(InvalidMedia, match="hidden size is 4; the model's is 5"):
        load(torch_file(TENSOR), hidden_size=5)


def test_a_legacy_torch_file_is_refused() -> None:
    file = io.BytesIO()
    torch.save(TENSOR, file, _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidMedia, match="never loaded"):
        load(file.getvalue())


def test_calls_in_a_pickle_are_never_made(tmp_path: Path) -> None:
    canary = tmp_path / "called"
    code = b"\x80\x02cbuiltins\nopen\n" + f"(V{canary}\nVw\ntR.".encode()
    for data in (code, rezipped(torch_file(TENSOR), lambda n, r: code if n == "data.pkl" else r)):
        with pytest.raises(InvalidMedia):
            load(data)
    with pytest.raises(InvalidMedia, match="of one plain tensor"):
        load(with_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n", b"cbuiltins\nexec\n"))
    assert not canary.exists()


def test_negative_and_overlapping_strides_are_refused() -> None:
    shape, strides = b"K\x03K\x04\x86", b"K\x04K\x01\x86"
    assert torch.equal(as_torch(load(with_pickle(shape, shape))), TENSOR)
    for bad in (
        b"K\x00K\x01\x86",
        b"K\x01K\x01\x86",
        b"J\xfc\xff\xff\xffK\x01\x86",
        b"K\x04\x85",
        b"NK\x01\x86",
    ):
        with pytest.raises(InvalidMedia):
            load(with_pickle(strides, bad))


@pytest.mark.parametrize(
    "shape", [b"K\x04K\x04\x86", b"M\xff\xffK\x04\x86", b"\x8a\x05\x00\x00\x00\x00\x7fK\x04\x86"]
)
def test_a_record_shorter_than_the_shape_is_refused_even_if_the_file_is_longer(shape: bytes) -> None:
    with pytest.raises(InvalidMedia, match=r"(truncated: \d+ bytes are missing)|strides"):
        load(with_pickle(b"K\x03K\x04\x86", shape))


def test_an_offset_outside_the_record_is_refused() -> None:
    with pytest.raises(InvalidMedia, match="truncated: 4 bytes are missing"):
        load(with_pickle(b"QK\x00", b"QK\x01"))
    with pytest.raises(InvalidMedia):
        load(with_pickle(b"QK\x00", b"QJ\xff\xff\xff\xff"))


def test_compressed_records_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="compressed"):
        load(rezipped(torch_file(TENSOR), lambda _, record: record, zipfile.ZIP_DEFLATED))


def test_torchscript_archives_are_refused() -> None:
    script = rezipped(torch_file(TENSOR), lambda name, r: r)
    with zipfile.ZipFile(file := io.BytesIO(script), "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/constants.pkl", b"")
    with pytest.raises(InvalidMedia, match="TorchScript"):
        load(file.getvalue())


@pytest.mark.parametrize(
    ("record", "content", "reason"),
    [
        ("data.pkl", None, "not one of torch.save"),
        ("data/0", None, "lacks the record"),
        ("byteorder", b"big", "big-endian"),
        ("data.pkl", b"x" * 70_000, "larger than a plain"),
        ("data.pkl", b"", "damaged"),
        ("data.pkl", b"\x80\x02R.", "damaged"),
        ("data.pkl", b"\x80\x02h\x09.", "damaged"),
    ],
)
def test_archives_of_other_writers_are_refused(record: str, content: bytes | None, reason: str) -> None:
    data = rezipped(torch_file(TENSOR), lambda name, old: content if name == record else old)
    with pytest.raises(InvalidMedia, match=reason):
        load(data)


@pytest.mark.parametrize("shift", [-50, -1, 1, 50])
def test_an_archive_with_wrong_offsets_is_refused(shift: int) -> None:
    data = rezipped(torch_file(TENSOR), lambda _, record: record)
    (offset,) = struct.unpack("<L", data[-6:-2])
    with pytest.raises(InvalidMedia, match="truncated or damaged"):
        load(data[:-6] + struct.pack("<L", offset + shift) + data[-2:])


def test_a_huge_directory_is_not_read() -> None:
    with zipfile.ZipFile(file := io.BytesIO(torch_file(TENSOR)), "a") as archive:
        for i in range(1000):
            archive.writestr(f"archive/{i:0100}", b"")
    with pytest.raises(InvalidMedia, match="damaged"):
        load(file.getvalue())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({}, "holds 0 tensors"),
        ({"a": {}, "b": {}}, "holds 2 tensors"),
        ({"a": {}}, "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [1, -1], "data_offsets": [0, 4]}}, "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [1, True], "data_offsets": [0, 4]}}, "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 4]}}, "4 bytes are missing"),
        ({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, "8 bytes are missing"),
        ({"a": {"dtype": "I64", "shape": [1, 1], "data_offsets": [0, 8]}}, "dtype is int64"),
        (b"{]", "not valid JSON"),
        (b"{" + b" " * 2**17, "the limit is 65536"),
    ],
)
def test_bad_safetensors_headers_are_refused(header: dict[str, Any] | bytes, reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        load(safetensors_file(header, b"\0" * 8))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy_file(np.zeros((2, 2), np.int64)), "dtype is int64"),
        (npy_file(np.zeros((2, 2), ">f4")), "dtype is >f4"),
        (npy_file(np.zeros((2, 2), [("a", "f4")])), r"dtype is \|V4"),
        (npy_file(np.zeros((2, 3), np.float32, order="F")), "Fortran"),
        (npy_file(np.zeros((2, 2), np.float32))[:-1], "1 bytes are missing"),
        (npy_file(np.zeros((2, 2), np.float32))[:40], "header"),
        (b"\x93NUMPY\x02\x00\x00", "header is damaged"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "header is damaged"),
        (npy_header(b"[" * 9000), "header is damaged"),
        (npy_header(b"x'"), "header is damaged"),
        (npy_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, -2), }"), "header is damaged"),
        (npy_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, True), }"), "header is damaged"),
    ],
)
def test_bad_npy_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        load(data)


def test_an_object_array_is_refused() -> None:
    with pytest.raises(InvalidMedia, match=r"dtype is \|O"):
        load(npy_file(np.array([[None]], dtype=object)))


@pytest.mark.parametrize(
    "text", [b"", b"====", b"AAA", b"AAA\n", b"A-__", b"AA=A", b"\xff\xff\xff\xff", b"AA==AAAA"]
)
def test_invalid_base64_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidMedia, match="not valid base64"):
        load_text(text)


def test_padding_between_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_stream, "_SLICE", 4)
    with pytest.raises(InvalidMedia, match="padding only at its end"):
        load_text(b"AA==AAAA")


@given(st.lists(st.integers(0, 1500), max_size=6))
def test_cuts_make_no_difference(cuts: list[int]) -> None:
    text = np.frombuffer(base64.b64encode(torch_file(TENSOR)), np.uint8)
    borders = [0, *sorted(min(cut, text.size) for cut in cuts), text.size]
    pieces = [text[start:stop] for start, stop in pairwise(borders)]
    result = load_embeds(pieces, max_bytes=2**20, hidden_size=4, stopped=threading.Event())
    assert torch.equal(as_torch(result), TENSOR)


def test_the_size_is_checked_before_anything_is_decoded() -> None:
    with pytest.raises(MediaTooLarge, match="has 9 bytes; the limit is 8"):
        load_text(b"!" * 12, max_bytes=8)


def test_decoding_stops_when_the_event_is_set() -> None:
    with pytest.raises(StageTimeout):
        load_text(b"AAAA", stopped=True)


valid_files = st.sampled_from(
    [torch_file(TENSOR), npy_file(TENSOR.numpy()), safetensors.torch.save({"x": TENSOR.half()})]
)


@given(valid_files, st.data())
def test_damaged_files_are_refused_or_give_a_valid_shape(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        result = load(bytes(damaged[: draw.draw(st.integers(1, len(damaged)))]))
    except InvalidMedia:
        return
    assert result.values.ndim == 2
    assert result.values.nbytes <= len(damaged)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x20\0\0\0\0\0\0\0{", b""]),
)
def test_noise_is_refused(noise: bytes, head: bytes) -> None:
    with pytest.raises(InvalidMedia):
        load(head + noise)


# The corpus lets a server accept or refuse these; this server refuses them.
NOT_TAKEN = {
    "embeds/made_legacy_format.pt",
    "embeds/made_list_of_two.pt",
    "embeds/made_dict_embeds_grid.pt",
}


@pytest.mark.parametrize("row", embedding_files())
def test_the_corpus(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = (CORPUS / "media" / row["file"]).read_bytes()
    if row["outcome"] == "reject" or row["file"] in NOT_TAKEN:
        with pytest.raises(InvalidMedia) as caught:
            load(data, hidden_size=2048)
        assert "/" not in caught.value.message
    else:
        result = load(data, hidden_size=2048)
        assert list(result.values.shape) == row["expected"].get("shape", [4, 2048])
        assert result.dtype == row["expected"].get("dtype", "float16")
    assert not list(tmp_path.glob("MM_CANARY*"))
