"""Turns rows of levels into Arrow arrays: one type per side of an API, for all its versions."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from kdissect.arrays import Array, Bools, Bytes, Indices, Ints, Rows, address_of
from kdissect.codec.column_kernel import INDICES
from kdissect.codec.strings import as_text, gathered, uuids
from kdissect.protocol.column_plan import ColumnPlan, Node, Role
from kdissect.protocol.model import Type

_ARROW = {
    Type.BOOL: pa.bool_(),
    Type.INT8: pa.int8(),
    Type.INT16: pa.int16(),
    Type.UINT16: pa.int32(),  # Spark has no unsigned integers
    Type.INT32: pa.int32(),
    Type.INT64: pa.int64(),
    Type.FLOAT64: pa.float64(),
    Type.UUID: pa.string(),
    Type.STRING: pa.string(),
    Type.BYTES: pa.binary(),
}
_STORED: dict[Type, type[np.generic]] = {
    Type.BOOL: np.bool_,
    Type.INT8: np.int8,
    Type.INT16: np.int16,
    Type.UINT16: np.uint16,
    Type.INT32: np.int32,
    Type.INT64: np.int64,
    Type.FLOAT64: np.float64,
}
_LENGTH_BITS = 31  # of a packed place
PRESENT = "_present"  # the only child of a struct without fields: Parquet has no empty structs
UNKNOWN_TAGS = pa.list_(
    pa.struct([("path", pa.string()), ("tag", pa.int32()), ("data", pa.binary())])
)


@cache
def arrow_type(node: Node) -> pa.DataType:
    """The Arrow type of a field's column."""
    if node.element is not None:
        return pa.list_(arrow_type(node.element))
    if node.type is not Type.STRUCT:
        return _ARROW[node.type]
    children = [(child.name, arrow_type(child)) for child in node.children.values()]
    return pa.struct(children or [(PRESENT, pa.bool_())])


def _bits(valid: Bools) -> tuple[pa.Buffer | None, int]:
    """(validity bitmap or None, null count)."""
    nulls = len(valid) - int(np.count_nonzero(valid))
    if not nulls:
        return None, 0
    return pa.py_buffer(np.packbits(valid, bitorder="little")), nulls


class Reader:
    """Reads filled rows as Arrow arrays.

    rows: of each level, as many as are used. invalid_utf8: bool per message, set if one of its
    strings is no UTF-8.
    """

    def __init__(self, rows: list[Bytes], buf: Bytes) -> None:
        self.rows = rows
        self.buf = buf
        self.invalid_utf8 = np.zeros(len(rows[0]), np.bool_)
        self.lineage: list[Ints] = []  # offsets of the lists around the current level

    def struct(self, node: Node, level: int, valid: Bools | None) -> pa.StructArray:
        """A struct from its children's columns; valid: which are there, None: all."""
        count = len(self.rows[level])
        bits, nulls = (None, 0) if valid is None else _bits(valid)
        children = [self.column(child, level) for child in node.children.values()]
        if not children:
            children = [pa.repeat(True, count)]
        return pa.Array.from_buffers(arrow_type(node), count, [bits], nulls, 0, children)

    def column(self, node: Node, level: int) -> pa.Array:
        """A field's column."""
        valid = self.rows[level][:, node.at].view(np.bool_).copy()
        if not valid.any():
            return pa.nulls(len(valid), arrow_type(node))
        if node.element is not None:
            return self._list(node, node.element, level, valid)
        if node.type is Type.STRUCT:
            return self.struct(node, level, valid)
        return self._leaf(node, level, valid)

    def values(self, node: Node, level: int, kind: type[np.generic]) -> Array:
        """The values of a column; where it is null, they are undefined."""
        begin = node.at + 1
        chosen = self.rows[level][:, begin : begin + np.dtype(kind).itemsize]
        return chosen.view(kind)[:, 0].copy()

    def _list(self, node: Node, element: Node, level: int, valid: Bools) -> pa.ListArray:
        offsets = np.zeros(len(valid) + 1, np.int32)
        np.cumsum(self.values(node, level, np.int32) * valid, out=offsets[1:])
        self.lineage.append(offsets)
        if element.type is Type.STRUCT:
            read = self.struct(element, node.level, None)
        else:
            read = self.column(element, node.level)
        self.lineage.pop()
        bits, nulls = _bits(valid)
        buffers = [bits, pa.py_buffer(offsets)]
        return pa.Array.from_buffers(arrow_type(node), len(valid), buffers, nulls, 0, [read])

    def _leaf(self, node: Node, level: int, valid: Bools) -> pa.Array:
        if node.type in (Type.STRING, Type.BYTES):
            packed = self.values(node, level, np.int64)
            length = np.where(valid, packed & ((1 << _LENGTH_BITS) - 1), -1)
            array = gathered(address_of(self.buf) + (packed >> _LENGTH_BITS), length)
            if node.type is Type.STRING:
                array, invalid = as_text(array)
                self._flag(invalid)
            return array
        if node.type is Type.UUID:
            return uuids(self.buf, self.values(node, level, np.int64), valid).dictionary_decode()
        stored = _STORED[node.type]
        return pa.array(self.values(node, level, stored), arrow_type(node), mask=~valid)

    def _flag(self, rows: Indices) -> None:
        """Set invalid_utf8 for the messages that contain these rows of the current level."""
        for offsets in reversed(self.lineage):
            rows = np.searchsorted(offsets, rows, side="right") - 1
        self.invalid_utf8[rows] = True


def field_paths(plan: ColumnPlan, pc: Ints, indices: Ints) -> pa.StringArray:
    """The paths of fields, ``topics[2].partitions[0]`` for indices 2, 0; "" if pc is -1.

    pc: int[n]. indices: int[n, INDICES], of the arrays around each, from the outermost on.
    """
    texts = [pa.array([], pa.string())]
    for at in np.unique(pc).tolist():
        first, *rest = ("" if at < 0 else plan.paths[at]).split("[]")
        rows = np.flatnonzero(pc == at)
        text = pa.repeat(first, len(rows))
        for part, index in zip(rest, indices[rows].T, strict=False):
            number = pa.array(index).cast(pa.string())
            text = compute.binary_join_element_wise(text, "[", number, f"]{part}", "")
        texts.append(text)
    order = np.argsort(pc, kind="stable")
    return pa.concat_arrays(texts).take(pa.array(np.argsort(order)))


def unknown_tags(plan: ColumnPlan, buf: Bytes, marks: Rows, rows: int) -> pa.ListArray:
    """list<struct<path, tag, data>> per message, null if it has no unknown tags.

    marks: MARK rows of the messages. path: of the struct with the tag; "" for the body itself,
    "header" for the header.
    """
    at = np.flatnonzero(marks["role"] == Role.UNKNOWN_TAG)
    if not len(at):
        return pa.nulls(rows, UNKNOWN_TAGS)
    tags, data = marks[at], marks[at + 1]
    # a tag's indices are the marks after that of its data
    places = at[:, None] + 2 + np.arange(INDICES)
    is_index = np.arange(INDICES) < plan.indices[tags["length"]][:, None]
    index = np.where(is_index, marks["value"][np.minimum(places, len(marks) - 1)], 0)
    columns = [
        field_paths(plan, tags["length"], index),
        pa.array(tags["value"].astype(np.int32)),
        gathered(address_of(buf) + data["value"], data["length"].copy()),
    ]
    values = pa.StructArray.from_arrays(columns, fields=list(UNKNOWN_TAGS.value_type))
    tag_counts = np.bincount(tags["row"], minlength=rows)
    offsets = np.append(0, np.cumsum(tag_counts)).astype(np.int32)
    mask = pa.array(tag_counts == 0)
    return pa.ListArray.from_arrays(pa.array(offsets), values, UNKNOWN_TAGS, mask=mask)
