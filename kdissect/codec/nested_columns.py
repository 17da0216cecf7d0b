"""Arrow columns of structs and lists, of which some parts are replaced."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc


def with_fields(
    structs: pa.StructArray, columns: Mapping[str, pa.Array], after: str = ""
) -> pa.StructArray:
    """The structs with these fields in place of their own; new ones follow the field `after`."""
    fields: dict[str, pa.Array] = {}
    for place, name in enumerate(structs.type.names):
        # field() respects the parent's offset; flatten() would push its nulls into the children
        fields[name] = columns[name] if name in columns else structs.field(place)
        if name == after:
            fields |= columns
    mask = structs.is_null() if structs.null_count else None
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=mask)


def with_values(lists: pa.ListArray, values: pa.Array) -> pa.ListArray:
    """The lists with other elements: values has one for each of `lists.flatten()`."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)
