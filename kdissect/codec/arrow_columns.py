"""Turns filled builders into Arrow arrays: one type per side of an API, for all its versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kdissect.arrays import address_of
from kdissect.codec.column_buffers import Builders
from kdissect.codec.strings import as_text, gathered, uuids
from kdissect.protocol.column_plan import ColumnPlan, Leaf, List, Node, Struct
from kdissect.protocol.model import Type

_ARROW = {
    Type.BOOL: pa.bool_(),
    Type.INT8: pa.int8(),
    Type.INT16: pa.int16(),
    Type.UINT16: pa.int32(),  # Spark has no unsigned integers
    Type.INT32: pa.int32(),
    Type.UINT32: pa.int64(),
    Type.INT64: pa.int64(),
    Type.FLOAT64: pa.float64(),
    Type.UUID: pa.string(),
    Type.STRING: pa.string(),
    Type.BYTES: pa.binary(),
}
_LENGTH_BITS = 31  # of a packed place
PRESENT = "_present"  # the only child of a struct without fields: Parquet has no empty structs
UNKNOWN_TAGS = pa.list_(
    pa.struct([("path", pa.string()), ("tag", pa.int32()), ("data", pa.binary())])
)


def arrow_type(node: Node) -> pa.DataType:
    """The Arrow type of a field's column."""
    if isinstance(node, Leaf):
        return _ARROW[node.type]
    if isinstance(node, List):
        return pa.list_(arrow_type(node.element))
    children = [(child.name, arrow_type(child)) for child in node.children.values()]
    return pa.struct(children or [(PRESENT, pa.bool_())])


def _bits(valid: NDArray[np.uint8]) -> tuple[pa.Buffer | None, int]:
    """(validity bitmap or None, null count) of validity bytes."""
    # as bool, because NumPy counts those faster
    nulls = len(valid) - int(np.count_nonzero(valid.view(np.bool_)))
    if not nulls:
        return None, 0
    return pa.py_buffer(np.packbits(valid, bitorder="little")), nulls


class Reader:
    """Reads the rows of filled builders as Arrow arrays.

    invalid_utf8: bool per message, set if one of its strings is no UTF-8.
    """

    def __init__(
        self, builders: Builders, present: NDArray[np.bool_], buf: NDArray[np.uint8], rows: int
    ) -> None:
        self.builders = builders
        self.present = present.tolist()
        self.buf = buf
        self.invalid_utf8 = np.zeros(rows, np.bool_)
        self.types: dict[int, pa.DataType] = builders.plan.memo.setdefault("types", {})
        self.lineage: list[NDArray[np.int32]] = []  # offsets of the lists around the current level

    def type_of(self, node: Node) -> pa.DataType:
        known = self.types.get(id(node))
        if known is None:
            known = self.types[id(node)] = arrow_type(node)
        return known

    def struct(self, node: Struct, count: int, validity: tuple[pa.Buffer | None, int]) -> pa.Array:
        """A struct from its children's columns at the current level."""
        if node.children:
            children = [self.column(child, count) for child in node.children.values()]
        else:
            ones = pa.py_buffer(np.full((count + 7) // 8, 255, np.uint8))
            children = [pa.Array.from_buffers(pa.bool_(), count, [None, ones], 0)]
        kind = self.type_of(node)
        return pa.Array.from_buffers(kind, count, [validity[0]], validity[1], 0, children)

    def column(self, node: Node, count: int) -> pa.Array:
        """A field's column with `count` rows of the current level."""
        column = node.column
        if not self.present[column]:
            return pa.nulls(count, self.type_of(node))
        valid = self.builders.valid[column][:count]
        if isinstance(node, Leaf):
            return self.leaf(node, count, valid)
        validity = _bits(valid)
        if isinstance(node, Struct):
            return self.struct(node, count, validity)
        lengths = self.builders.data[column][: 4 * count].view(np.int32)
        offsets = np.zeros(count + 1, np.int32)
        if validity[1]:
            lengths = lengths * valid
        np.cumsum(lengths, out=offsets[1:])
        child_count = int(self.builders.count[node.level])
        self.lineage.append(offsets)
        if isinstance(node.element, Leaf):
            child = self.column(node.element, child_count)
        else:
            child = self.struct(node.element, child_count, (None, 0))
        self.lineage.pop()
        buffers = [validity[0], pa.py_buffer(offsets)]
        return pa.Array.from_buffers(self.type_of(node), count, buffers, validity[1], 0, [child])

    def leaf(self, node: Leaf, count: int, valid: NDArray[np.uint8]) -> pa.Array:
        kind = _ARROW[node.type]
        data = self.builders.data[node.column]
        if node.type in (Type.STRING, Type.BYTES):
            packed = data[: 8 * count].view(np.int64)
            length = np.where(valid, packed & ((1 << _LENGTH_BITS) - 1), -1)
            array = gathered(address_of(self.buf) + (packed >> _LENGTH_BITS), length)
            if node.type is Type.STRING:
                array, invalid = as_text(array)
                self._flag(invalid)
            return array
        if node.type is Type.UUID:
            return uuids(self.buf, data[: 8 * count].view(np.int64), valid.view(np.bool_))
        bits, nulls = _bits(valid)
        values: NDArray[Any]
        if node.type is Type.BOOL:
            values = np.packbits(data[:count], bitorder="little")
        elif node.type is Type.UINT16:
            values = data[: 2 * count].view(np.uint16).astype(np.int32)
        elif node.type is Type.UINT32:
            values = data[: 4 * count].view(np.uint32).astype(np.int64)
        else:
            width = self.builders.plan.column_width[node.column]
            values = data[: width * count].copy()
        return pa.Array.from_buffers(kind, count, [bits, pa.py_buffer(values)], nulls)

    def _flag(self, rows: NDArray[np.int64]) -> None:
        """Set invalid_utf8 for the messages that contain these rows of the current level."""
        for offsets in reversed(self.lineage):
            rows = np.searchsorted(offsets, rows, side="right") - 1
        self.invalid_utf8[rows] = True


def place_filled(template: str, indices: list[int]) -> str:
    """Return a path with indices: ``topics[2].partitions[0]`` for 2, 0."""
    parts = template.split("[]")
    filled = "".join(f"{part}[{at}]" for part, at in zip(parts[:-1], indices, strict=False))
    return filled + parts[-1]


def unknown_tags(plan: ColumnPlan, buf: NDArray[np.uint8], start: NDArray[np.int64],
                 tags: NDArray[np.void], rows: int) -> pa.ListArray:  # fmt: skip
    """list<struct<path, tag, data>> per message, null if it has no unknown tags.

    tags: column_kernel.UNKNOWN_TAG, in row order. path: of the struct with the tag; "" for the body
    itself, "header" for the header.
    """
    if not len(tags):
        return pa.nulls(rows, UNKNOWN_TAGS)
    tag_counts = np.bincount(tags["row"], minlength=rows)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(tag_counts, out=offsets[1:])
    depth = np.array([path.count("[]") for path in plan.paths], np.int64)[tags["pc"]]
    index = np.where(np.arange(tags["index"].shape[1]) < depth[:, None], tags["index"], 0)
    keys = np.column_stack([tags["pc"], index])
    first = np.ones(len(tags), np.bool_)  # first tag of each struct
    first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    texts = [place_filled(plan.paths[pc], where) for pc, *where in keys[first].tolist()]
    path = pa.array(texts, pa.string()).take(pa.array(np.cumsum(first) - 1))
    data = gathered(
        address_of(buf) + start[tags["row"]] + tags["pos"], tags["length"].astype(np.int64)
    )
    tag = pa.array(np.ascontiguousarray(tags["tag"]), pa.int32())
    fields = list(UNKNOWN_TAGS.value_type)
    values = pa.StructArray.from_arrays([path, tag, data], fields=fields)
    bits, nulls = _bits((tag_counts > 0).astype(np.uint8))
    buffers = [bits, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(UNKNOWN_TAGS, rows, buffers, nulls, 0, [values])
