"""Columns `<field>_decoded` of ``apis/<ApiName>``: what messages carry inside opaque bytes.

`add_decoded` puts a decoded column behind each such field, at any depth of lists; the types follow
from the API alone, so that all files of a table agree, also where a side is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kdissect.status import Status
from kdissect.wire.embedded import DECODED, Embedded, assignments, subscriptions

REQUEST, RESPONSE = 0, 1
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EmbeddedFault:
    """Bytes inside a message of row `row` that claim a format and break off."""

    row: int
    side: int
    status: Status
    detail: str


class _Sides:
    """Request and response of the same exchanges, and the faults met so far."""

    def __init__(self, request: pa.StructArray, response: pa.StructArray, reveal: bool) -> None:
        self.bodies = [request, response]
        self.reveal_secrets = reveal
        self.faults: list[EmbeddedFault] = []

    def text(self, side: int, name: str) -> pa.Array:
        """A string field of the body, null where there is no body."""
        body = self.bodies[side]
        column = body.field(name)
        return pc.if_else(body.is_valid(), column, pa.scalar(None, column.type))

    def beside(
        self, entries: pa.StructArray, name: str, embedded: Embedded, side: int, rows: Rows
    ) -> pa.StructArray:
        """`entries` with the decoded column behind field `name`; rows: messages of the entries."""
        for fault in embedded.faults:
            row = int(rows[fault.index])
            if self.bodies[side][row].is_valid:
                detail = f"{name}: {fault.detail}"
                self.faults.append(EmbeddedFault(row, side, fault.status, detail))
        at = entries.type.get_field_index(name)
        columns = [entries.field(i) for i in range(entries.type.num_fields)]
        fields = list(entries.type)
        columns.insert(at + 1, embedded.column)
        fields.insert(at + 1, pa.field(name + DECODED, embedded.column.type))
        mask = entries.is_null() if entries.null_count else None
        return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def _top(array: pa.Array) -> Rows:
    return np.arange(len(array))


def _inside(
    array: pa.StructArray,
    name: str,
    rows: Rows,
    change: Callable[[pa.StructArray, Rows, Rows], pa.StructArray],
) -> pa.StructArray:
    """`array` with the elements of its list `name` changed.

    change(elements, rows of the messages, rows of `array`): the latter two per element.
    """
    at = array.type.get_field_index(name)
    columns = [array.field(i) for i in range(array.type.num_fields)]
    entries = columns[at]
    offsets = entries.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    parents = np.repeat(_top(entries), np.diff(offsets))
    elements = change(entries.values.slice(first, last - first), rows[parents], parents)
    valid = entries.is_valid().to_numpy(zero_copy_only=False)
    bits = pa.py_buffer(np.packbits(valid, bitorder="little")) if entries.null_count else None
    buffers = [bits, pa.py_buffer((offsets - first).astype(np.int32))]
    columns[at] = pa.Array.from_buffers(
        pa.list_(elements.type), len(entries), buffers, entries.null_count, 0, [elements]
    )
    fields = list(array.type)
    fields[at] = pa.field(name, columns[at].type)
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def _known(first: pa.Array, other: pa.Array) -> pa.Array:
    """What the first says, else the other."""
    return pc.if_else(pc.equal(first, "").fill_null(True), other, first)


def _join_group(sides: _Sides) -> None:
    asked = sides.text(REQUEST, "protocol_type")
    answered = _known(sides.text(RESPONSE, "protocol_type"), asked)
    chosen = sides.text(RESPONSE, "protocol_name")

    def protocols(entries: pa.StructArray, rows: Rows, _: Rows) -> pa.StructArray:
        found = subscriptions(entries.field("metadata"), asked.take(rows), entries.field("name"))
        return sides.beside(entries, "metadata", found, REQUEST, rows)

    def members(entries: pa.StructArray, rows: Rows, _: Rows) -> pa.StructArray:
        found = subscriptions(entries.field("metadata"), answered.take(rows), chosen.take(rows))
        return sides.beside(entries, "metadata", found, RESPONSE, rows)

    request, response = sides.bodies
    request = _inside(request, "protocols", _top(request), protocols)
    response = _inside(response, "members", _top(response), members)
    sides.bodies = [request, response]


def _sync_group(sides: _Sides) -> None:
    kind = _known(sides.text(REQUEST, "protocol_type"), sides.text(RESPONSE, "protocol_type"))
    name = _known(sides.text(REQUEST, "protocol_name"), sides.text(RESPONSE, "protocol_name"))

    def members(entries: pa.StructArray, rows: Rows, _: Rows) -> pa.StructArray:
        found = assignments(entries.field("assignment"), kind.take(rows), name.take(rows))
        return sides.beside(entries, "assignment", found, REQUEST, rows)

    request, response = sides.bodies
    found = assignments(response.field("assignment"), kind, name)
    request = _inside(request, "assignments", _top(request), members)
    response = sides.beside(response, "assignment", found, RESPONSE, _top(response))
    sides.bodies = [request, response]


def _describe_groups(sides: _Sides) -> None:
    def groups(entries: pa.StructArray, rows: Rows, _: Rows) -> pa.StructArray:
        kind, name = entries.field("protocol_type"), entries.field("protocol_data")

        def members(entries: pa.StructArray, rows: Rows, parents: Rows) -> pa.StructArray:
            of = kind.take(parents), name.take(parents)
            found = subscriptions(entries.field("member_metadata"), *of)
            entries = sides.beside(entries, "member_metadata", found, RESPONSE, rows)
            found = assignments(entries.field("member_assignment"), *of)
            return sides.beside(entries, "member_assignment", found, RESPONSE, rows)

        return _inside(entries, "members", rows, members)

    response = sides.bodies[RESPONSE]
    sides.bodies[RESPONSE] = _inside(response, "groups", _top(response), groups)


_APIS: dict[int, Callable[[_Sides], None]] = {
    11: _join_group,
    14: _sync_group,
    15: _describe_groups,
}


def add_decoded(
    api_key: int, request: pa.StructArray, response: pa.StructArray, reveal_secrets: bool
) -> tuple[pa.StructArray, pa.StructArray, list[EmbeddedFault]]:
    """Both sides of the same exchanges with their `_decoded` columns, and the faults inside.

    request, response: `wire.body.body_type` of that API, not redacted. Without `reveal_secrets` the
    decoded columns hold no secrets; the bytes beside them are for `redact_body`.
    """
    decode = _APIS.get(api_key)
    if decode is None:
        return request, response, []
    sides = _Sides(request, response, reveal_secrets)
    decode(sides)
    return sides.bodies[REQUEST], sides.bodies[RESPONSE], sides.faults
