"""Turns the data segments of a stream into disjoint pieces; bytes captured first win.

`reassembly.py` has the theory of operation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.capture.segments import NOT_COUNTED
from kdissect.jit import inlined, load_u8, making_kernel, making_part
from kdissect.tcp.byte_ranges import find, int64
from kdissect.tcp.columns import NO_ACK

BLOCK = 1 << 13  # a stream can be cut after each block of so many segments


@making_kernel
def listed(segments: Any, connection: Any, mark: Any, sides: Any, rows: Any) -> Any:
    """Fill rows int64[]: data segments by stream, in order of capture; returns start int64[sides
    + 1]."""
    start = np.zeros(len(sides) + 1, np.int64)
    for stream in range(len(sides)):
        start[stream + 1] = start[stream] + sides[stream]["data_count"]
    place = start[:-1].copy()
    for row in range(len(segments)):
        if mark[row] == 0 and segments[row]["length"] > 0:
            stream = 2 * int64(connection[row]) + int64(segments[row]["side"])
            rows[place[stream]] = row
            place[stream] += 1
    return start


@inlined
def _sink(heap: Any, used: int) -> None:
    """Restore the heap after its first element was replaced."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= used:
            return
        if child + 1 < used and heap[child + 1] < heap[child]:
            child += 1
        if heap[at] <= heap[child]:
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@inlined
def _rise(heap: Any, at: int) -> None:
    while at > 0 and heap[at] < heap[(at - 1) >> 1]:
        parent = (at - 1) >> 1
        heap[at], heap[parent] = heap[parent], heap[at]
        at = parent


@making_kernel
def _sorted(values: Any) -> Any:
    """Return the order of ascending values, int64[n]: a merge sort, fast for nearly sorted values.

    np.argsort would take seconds to compile.
    """
    count = len(values)
    order = np.empty(count, np.int64)
    for index in range(count):
        order[index] = index
    merged = np.empty(count, np.int64)
    width = 1
    while width < count:
        for low in range(0, count, 2 * width):
            left = low
            middle = min(low + width, count)
            right = middle
            high = min(middle + width, count)
            is_sorted = right == high or values[order[middle - 1]] <= values[order[middle]]
            for place in range(low, high):
                is_left = left < middle
                if is_left and not is_sorted and right < high:
                    is_left = values[order[left]] <= values[order[right]]
                if is_left:
                    merged[place] = order[left]
                    left += 1
                else:
                    merged[place] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


@making_kernel
def sweep(first: Any, last: Any, pieces: Any) -> int:
    """Split overlapping intervals [first, last) into disjoint ones; the lower index wins.

    Fills `pos`, `end` and `segment` (the index of the interval) of up to 2n ascending pieces;
    returns their number.
    """
    # sweep by position; the heap holds the open intervals, the one captured first on top
    by_pos = _sorted(first)
    heap = np.empty(len(first), np.int64)
    used = 0
    waiting = 0
    count = 0
    here = int64(0)
    while waiting < len(first) or used:
        if not used:
            here = first[by_pos[waiting]]
        while waiting < len(first) and first[by_pos[waiting]] <= here:
            heap[used] = by_pos[waiting]
            _rise(heap, used)
            used += 1
            waiting += 1
        while used and last[heap[0]] <= here:
            used -= 1
            heap[0] = heap[used]
            _sink(heap, used)
        if not used:
            continue
        owner = heap[0]
        # the top interval owns the bytes up to its end, or up to the start of the next interval
        until = last[owner]
        if waiting < len(first) and first[by_pos[waiting]] < until:
            until = first[by_pos[waiting]]
        if count and pieces[count - 1]["segment"] == owner and pieces[count - 1]["end"] == here:
            pieces[count - 1]["end"] = until
        else:
            pieces[count]["pos"] = here
            pieces[count]["end"] = until
            pieces[count]["segment"] = owner
            count += 1
        here = until
    return count


@making_kernel
def lay_pieces(
    segments: Any, address: Any, number: Any, rows: Any, start: Any, sides: Any, pieces: Any,
    conflicts: Any,
) -> Any:  # fmt: skip
    """Fill `pieces` and the piece columns of each side; returns (pieces, conflicts) as counts."""
    count = 0
    conflict_count = 0
    for stream in range(len(start) - 1):
        side = sides[stream]
        side["piece_start"] = count
        origin = side["origin"]
        if side["is_messy"]:
            count, conflict_count = _lay_messy(
                segments, address, number, rows[start[stream] : start[stream + 1]], stream, sides,
                pieces, count, conflicts, conflict_count,
            )  # fmt: skip
        else:
            for index in range(start[stream], start[stream + 1]):
                row = rows[index]
                captured = int64(segments[row]["captured"])
                if captured:
                    pos = number[row] - origin
                    pieces[count]["pos"] = pos
                    pieces[count]["end"] = pos + captured
                    pieces[count]["address"] = address[row]
                    pieces[count]["file_pos"] = segments[row]["pos"]
                    pieces[count]["segment"] = row
                    count += 1
        side["piece_stop"] = count
        _settle(side, pieces)
    return count, conflict_count


@inlined
def _settle(side: Any, pieces: Any) -> None:
    """Set end, byte count and gap count of a side whose pieces are final."""
    origin = side["origin"]
    end = int64(0)
    if side["has_data"]:
        end = max(end, side["high"] - origin)
    # RFC 9293, 3.6: the FIN's sequence number follows the last byte, so it gives the stream's
    # length.
    if side["fin"] != NO_ACK:
        if side["has_syn"] or side["has_data"]:
            end = max(end, side["fin"] - origin)
    elif side["ack_high"] != NO_ACK and side["ack_high"] - origin > end + 1:
        # RFC 9293, 3.4: a FIN takes a sequence number, so one more than the end may acknowledge a
        # FIN that was not captured. Any larger acknowledgment proves missing bytes.
        end = side["ack_high"] - origin
    here = int64(0)
    for index in range(side["piece_start"], side["piece_stop"]):
        if pieces[index]["pos"] > here:
            side["gap_count"] += 1
        here = pieces[index]["end"]
        side["byte_count"] += here - pieces[index]["pos"]
    if end > here:
        side["gap_count"] += 1
    side["end"] = end


@making_kernel
def _lowest_behind(number: Any, rows: Any, origin: int) -> Any:
    """int64[blocks + 1]: lowest position in each block and all later ones."""
    blocks = (len(rows) + BLOCK - 1) // BLOCK
    lowest = np.empty(blocks + 1, np.int64)
    lowest[blocks] = np.int64(1) << 62
    for block in range(blocks - 1, -1, -1):
        low = lowest[block + 1]
        for index in range(block * BLOCK, min(len(rows), (block + 1) * BLOCK)):
            low = min(low, max(int64(0), number[rows[index]] - origin))
        lowest[block] = low
    return lowest


@making_part
def _lay_messy(
    segments: Any, address: Any, number: Any, rows: Any, stream: int, sides: Any, pieces: Any,
    count: int, conflicts: Any, conflict_count: int,
) -> Any:  # fmt: skip
    """Lay the pieces of a stream with out-of-order or overlapping segments.

    The stream is cut into runs of blocks if all bytes after a cut lie after all bytes before it.
    That keeps the work per run small and gives the same pieces.
    """
    origin = sides[stream]["origin"]
    lowest = _lowest_behind(number, rows, origin)
    begin = 0
    reached = int64(0)  # end of the run's captured bytes so far
    highest = int64(0)
    for block in range(len(lowest) - 1):
        stop = min(len(rows), (block + 1) * BLOCK)
        for index in range(block * BLOCK, stop):
            place = number[rows[index]] - origin
            captured = int64(segments[rows[index]]["captured"])
            reached = max(reached, max(int64(0), place) + max(int64(0), captured))
        if reached <= lowest[block + 1]:
            count, conflict_count, highest = _lay_run(
                segments, address, number, rows[begin:stop], stream, sides, pieces, count,
                conflicts, conflict_count, highest, begin == 0,
            )  # fmt: skip
            begin = stop
    return count, conflict_count


@making_kernel
def _lay_run(
    segments: Any, address: Any, number: Any, rows: Any, stream: int, sides: Any, pieces: Any,
    count: int, conflicts: Any, conflict_count: int, highest: int, is_first: bool,
) -> Any:  # fmt: skip
    """`_lay_messy` for one run; `highest`: end of all earlier segments, updated and returned."""
    side = sides[stream]
    origin = side["origin"]
    total = len(rows)
    first = np.empty(total, np.int64)
    last = np.empty(total, np.int64)
    won = np.zeros(total, np.int64)
    for index in range(total):
        row = rows[index]
        place = number[row] - origin
        first[index] = max(0, place)
        last[index] = max(first[index], place + int64(segments[row]["captured"]))
    begin = count
    count += sweep(first, last, pieces[begin:])
    for index in range(begin, count):
        interval = pieces[index]["segment"]
        row = rows[interval]
        pos = pieces[index]["pos"]
        skipped = pos - (number[row] - origin)
        pieces[index]["address"] = address[row] + np.uint64(skipped)
        pieces[index]["file_pos"] = segments[row]["pos"] + skipped
        pieces[index]["segment"] = row
        won[interval] += pieces[index]["end"] - pos
    for index in range(total):
        row = rows[index]
        place = number[row] - origin
        # RFC 9293, 3.10.7.4: a receiver trims bytes that it already has. Here the bytes captured
        # first stay, and a segment with such bytes counts as retransmitted.
        is_back = (index > 0 or not is_first or place < 0) and place < highest
        captured = int64(segments[row]["captured"])
        counted = 0 if segments[row]["ip_id"] & NOT_COUNTED else 1
        if won[index] < captured or (is_back and captured == 0):
            side["retransmitted_count"] += counted
            pos, differing = _conflict(
                pieces, begin, count, row, first[index], last[index], address[row], place
            )
            if differing:
                conflicts[conflict_count]["stream"] = stream
                conflicts[conflict_count]["segment"] = row
                conflicts[conflict_count]["pos"] = pos
                conflicts[conflict_count]["byte_count"] = differing
                conflict_count += 1
        elif is_back:
            side["out_of_order_count"] += counted
        highest = max(highest, place + int64(segments[row]["length"]))
    return count, conflict_count, highest


@inlined
def _conflict(
    pieces: Any, start: int, stop: int, row: int, first: int, last: int, address: Any, place: int
) -> Any:
    """(first position, count) of a segment's bytes in [first, last) that differ from the winning
    bytes."""
    pos = int64(-1)
    differing = int64(0)
    index = find(pieces, start, stop, first)
    while index < stop and pieces[index]["pos"] < last:
        if pieces[index]["segment"] != row:
            begin = max(first, pieces[index]["pos"])
            end = min(last, pieces[index]["end"])
            winner_address = pieces[index]["address"] - np.uint64(pieces[index]["pos"])
            for at in range(begin, end):
                if load_u8(winner_address + np.uint64(at)) != load_u8(
                    address + np.uint64(at - place)
                ):
                    if not differing:
                        pos = at
                    differing += 1
        index += 1
    return pos, differing
