"""What the records of a stream are, byte by byte: the definition of `tls_records.walk_records`."""

from __future__ import annotations

LOST = 0


def records(stream: list[int | None], has_origin: bool) -> list[tuple[int, int, int, int]]:
    """(type, position, size, captured bytes) of each record or lost stretch.

    `stream` has a byte, or None where it is missing, for each position up to the last captured one.
    """
    end = len(stream)
    found = []
    pos = 0
    if not has_origin:
        pos = next((at for at, byte in enumerate(stream) if byte is not None), end)
        boundary = _search(stream, pos)
        if boundary > pos:
            found.append((LOST, pos, boundary - pos, _captured(stream, pos, boundary)))
        pos = boundary
    while pos < end:
        size = _size(stream, pos)
        if size:
            kind = stream[pos] or 0
            found.append((kind, pos, size, _captured(stream, pos, pos + size)))
        else:
            size = _search(stream, pos + 1) - pos
            found.append((LOST, pos, size, _captured(stream, pos, pos + size)))
        pos += size
    return found


def _captured(stream: list[int | None], begin: int, end: int) -> int:
    return sum(byte is not None for byte in stream[begin:end])


def _size(stream: list[int | None], pos: int) -> int | None:
    """Size of the record at `pos` with its header, 0 where it has none, None: bytes missing."""
    head = [*stream[pos : pos + 5], None, None, None, None, None][:5]
    kind, major, minor, high, low = head
    if kind is None or major is None or minor is None or high is None or low is None:
        return None
    length = high << 8 | low
    is_good = 20 <= kind <= 23 and major == 3 and minor <= 4 and length <= 18432
    return 5 + length if is_good and (length or kind == 23) else 0


def _search(stream: list[int | None], pos: int) -> int:
    """The first place from `pos` on that is a boundary, else the end of the stream."""
    end = len(stream)
    for at in range(pos, end):
        size = _size(stream, at)
        if size and (at + size == end or (at + size < end and _size(stream, at + size) != 0)):
            return at
    return end
