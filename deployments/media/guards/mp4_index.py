"""Counts the samples that the tables of an MP4 or MOV declare, from its boxes alone.

A table can declare billions of samples in twelve bytes. FFmpeg makes an index entry for each while it opens
the file, before its caller can ask how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.errors import InvalidMedia

ENTRY_BYTES = 72  # FFmpeg's memory for one sample: the index entry and the timestamps it keeps separately

_MAX_BOXES = 1 << 20  # over half an hour in fragments of one frame each; a file with more opens slowly
_MAX_DEPTH = 12
# Boxes that hold no boxes. FFmpeg may read boxes inside any other one, now or in a later version.
_LEAVES = {b"mdat", b"stco", b"co64", b"stts", b"ctts", b"stss", b"stsz", b"stz2", b"stsc", b"trun", b"covr"}
_TABLES = (b"stsz", b"stz2", b"stsc", b"stts", b"trun", b"cmov")
# If an audio track's samples are one tick long, FFmpeg puts at least this many of them into an index entry.
_SAMPLES_PER_ENTRY = 160
_ONE = (1).to_bytes(4, "big")

Box = tuple[bytes, int, int]  # name, begin and end of its content


@dataclass(slots=True)
class _Track:
    """Counts of one track. If a table is there twice, the larger one counts: FFmpeg may use either."""

    samples: int = 0
    chunks: int = 0
    samples_in_chunk: int = 0
    kinds: set[bytes] = field(default_factory=set)
    durations: set[bytes] = field(default_factory=set)

    @property
    def entries(self) -> int:
        is_sound = self.kinds & {b"soun", b"vide"} == {b"soun"}
        if is_sound and {duration[:4] + duration[8:] for duration in self.durations} == {_ONE + _ONE}:
            return self.chunks * (1 + self.samples_in_chunk // _SAMPLES_PER_ENTRY)
        return self.samples


def promised_samples(data: bytes) -> int:
    """Returns the most index entries that FFmpeg would make; 0 if the file is not an MP4 or MOV.

    Raises InvalidMedia if the index is compressed or in implausibly many pieces. It does so too if tables lie
    inside a track's description, because FFmpeg would find them there.
    """
    total, track = 0, _Track()
    for number, (name, start, stop) in enumerate(_boxes(data, 0, len(data), 0)):
        if name == b"cmov" or number > _MAX_BOXES:
            raise InvalidMedia("The file's index is compressed or in too many pieces. Remux the file.")
        first, second = _number(data, start + 4), _number(data, start + 8)
        match name:
            case b"trak":
                total += track.entries
                track = _Track()
            case b"trun":
                total += first
            case b"hdlr":
                track.kinds.add(data[start + 8 : start + 12])
            case b"stts":
                track.durations.add(data[start + 4 : start + 16])
            case b"stsz" | b"stz2":
                track.samples = max(track.samples, second)
            case b"stco" | b"co64":
                track.chunks = max(track.chunks, first)
            case b"stsc":
                runs = range(start + 8, min(start + 8 + 12 * first, stop), 12)
                most = max((_number(data, run + 4) for run in runs), default=0)
                track.samples_in_chunk = max(track.samples_in_chunk, most)
            case b"stsd" if any(data.find(table, start, stop) >= 0 for table in _TABLES):
                raise InvalidMedia(
                    "The file's index is damaged: tables lie in a track's description. Remux it."
                )
    return total + track.entries


def _boxes(data: bytes, start: int, stop: int, depth: int) -> Iterator[Box]:
    """Yields every box, cut off at the end of its parent, as FFmpeg reads them."""
    while start + 8 <= stop:
        size, name, head = _number(data, start), data[start + 4 : start + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        elif size == 0:
            size = stop - start
        if size < head:
            return
        inside, end = start + head, min(start + size, stop)
        yield name, inside, end
        if name not in _LEAVES and depth < _MAX_DEPTH:
            if name == b"meta":  # FFmpeg reads its boxes from this one on
                inside = max(inside, data.find(b"hdlr", inside, end) - 4)
            yield from _boxes(data, inside, end, depth + 1)
        start = end


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
