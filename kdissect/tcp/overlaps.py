"""Turns the data segments of a stream into disjoint pieces; bytes captured first win.

`reassembly.py` has the theory of operation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect.arrays import Addresses, Indices, Ints, Marks, Positions, Rows, Struct
from kdissect.capture.segments import NOT_COUNTED
from kdissect.jit import inlined, int64, load_u8, making_kernel, making_part
from kdissect.tcp.byte_ranges import find
from kdissect.tcp.columns import NO_ACK

BLOCK = 1 << 13  # a stream can be cut after each block of so many segments


class Laying(NamedTuple):
    """What `lay_pieces` reads and fills.

    address, number: by segment. rows: data segments by stream, in order of capture. used: int64[2],
    counts of pieces and conflicts.
    """

    segments: Rows
    address: Addresses
    number: Positions
    rows: Indices
    sides: Rows
    pieces: Rows
    conflicts: Rows
    used: Ints


@making_kernel
def listed(segments: Rows, connection: Ints, mark: Marks, sides: Rows, rows: Indices) -> Indices:
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
def _first_free(free: Indices, cell: int) -> int:
    """The first cell from `cell` on that has no owner; shortens the way to it."""
    while free[cell] != cell:
        free[cell] = free[free[cell]]
        cell = free[cell]
    return cell


@making_kernel
def paint(bounds: Positions, pieces: Rows) -> int:
    """Split overlapping intervals into disjoint ones; the lower index wins.

    bounds: int64[2n], where the n intervals begin, then where they end. Fills `pos`, `end` and
    `segment` (the index of the interval) of up to 2n ascending pieces; returns their number.
    """
    total = len(bounds) // 2
    place = np.empty(2 * total, np.int64)  # where cells begin: the bounds, ascending, each once
    cell_of = np.empty(2 * total, np.int64)
    cells = -1
    for index in np.argsort(bounds, kind="mergesort"):  # linear if they nearly ascend
        if cells < 0 or place[cells] < bounds[index]:
            cells += 1
            place[cells] = bounds[index]
        cell_of[index] = cells
    owner = np.full(2 * total, -1, np.int64)
    free = np.arange(2 * total)
    for index in range(total):
        cell = _first_free(free, cell_of[index])
        while cell < cell_of[total + index]:
            owner[cell] = index
            free[cell] = cell + 1
            cell = _first_free(free, cell)
    count = 0
    for cell in range(cells):
        if owner[cell] >= 0 and (cell == 0 or owner[cell] != owner[cell - 1]):
            pieces[count]["pos"] = place[cell]
            pieces[count]["segment"] = owner[cell]
            count += 1
        if owner[cell] >= 0:
            pieces[count - 1]["end"] = place[cell + 1]
    return count


@making_kernel
def lay_pieces(laying: Laying, start: Indices) -> None:
    """Fill pieces, conflicts, and the piece columns of each side; start: result of `listed`."""
    segments, address, number, rows, sides, pieces, _, used = laying
    for stream in range(len(start) - 1):
        side = sides[stream]
        side["piece_start"] = used[0]
        if side["is_messy"]:
            _lay_messy(laying, stream, start[stream], start[stream + 1])
        else:
            for index in range(start[stream], start[stream + 1]):
                row = rows[index]
                captured = int64(segments[row]["captured"])
                if captured:
                    piece = pieces[used[0]]
                    piece["pos"] = number[row] - side["origin"]
                    piece["end"] = piece["pos"] + captured
                    piece["address"] = address[row]
                    piece["file_pos"] = segments[row]["pos"]
                    piece["segment"] = row
                    used[0] += 1
        side["piece_stop"] = used[0]
        _settle(side, pieces)


@inlined
def _settle(side: Struct, pieces: Rows) -> None:
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
def _lowest_behind(number: Positions, rows: Indices, origin: int) -> Positions:
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
def _lay_messy(laying: Laying, stream: int, start: int, stop: int) -> None:
    """Lay the pieces of a stream with out-of-order or overlapping segments, `rows[start:stop]`.

    The stream is cut into runs of blocks if all bytes after a cut lie after all bytes before it.
    That keeps the work per run small and gives the same pieces.
    """
    rows = laying.rows[start:stop]
    origin = laying.sides[stream]["origin"]
    lowest = _lowest_behind(laying.number, rows, origin)
    begin = 0
    reached = int64(0)  # end of the run's captured bytes so far
    highest = int64(0)
    for block in range(len(lowest) - 1):
        end = min(len(rows), (block + 1) * BLOCK)
        for row in rows[block * BLOCK : end]:
            place = laying.number[row] - origin
            captured = int64(laying.segments[row]["captured"])
            reached = max(reached, max(int64(0), place) + max(int64(0), captured))
        if reached <= lowest[block + 1]:
            highest = _lay_run(laying, stream, rows[begin:end], highest, begin == 0)
            begin = end


@making_kernel
def _lay_run(laying: Laying, stream: int, rows: Indices, highest: int, is_first: bool) -> int:
    """`_lay_messy` for one run; `highest`: end of all earlier segments, updated and returned."""
    segments, address, number, _, sides, pieces, conflicts, used = laying
    side = sides[stream]
    origin = side["origin"]
    total = len(rows)
    bounds = np.empty(2 * total, np.int64)
    first = bounds[:total]
    last = bounds[total:]
    won = np.zeros(total, np.int64)
    for index in range(total):
        row = rows[index]
        place = number[row] - origin
        first[index] = max(0, place)
        last[index] = max(first[index], place + int64(segments[row]["captured"]))
    begin = used[0]
    used[0] += paint(bounds, pieces[begin:])
    for piece in pieces[begin : used[0]]:
        interval = piece["segment"]
        row = rows[interval]
        skipped = piece["pos"] - (number[row] - origin)
        piece["address"] = address[row] + np.uint64(skipped)
        piece["file_pos"] = segments[row]["pos"] + skipped
        piece["segment"] = row
        won[interval] += piece["end"] - piece["pos"]
    for index in range(total):
        row = rows[index]
        place = number[row] - origin
        # RFC 9293, 3.10.7.4: a receiver trims bytes that it already has. Here the bytes captured
        # first stay, and a segment with such bytes counts as retransmitted.
        is_back = (index > 0 or not is_first or place < 0) and place < highest
        captured = int64(segments[row]["captured"])
        counted = 0 if segments[row]["marks"] & NOT_COUNTED else 1
        if won[index] < captured or (is_back and captured == 0):
            side["retransmitted_count"] += counted
            pos, differing = _conflict(
                pieces[begin : used[0]], row, first[index], last[index], address[row], place
            )
            if differing:
                conflict = conflicts[used[1]]
                conflict["stream"] = stream
                conflict["segment"] = row
                conflict["pos"] = pos
                conflict["byte_count"] = differing
                used[1] += 1
        elif is_back:
            side["out_of_order_count"] += counted
        highest = max(highest, place + int64(segments[row]["length"]))
    return highest


@inlined
def _conflict(
    pieces: Rows, row: int, first: int, last: int, address: np.uint64, place: int
) -> tuple[int, int]:
    """(first position, count) of a segment's bytes in [first, last) that differ from the winning
    bytes."""
    pos = int64(-1)
    differing = int64(0)
    index = find(pieces, 0, len(pieces), first)
    while index < len(pieces) and pieces[index]["pos"] < last:
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
