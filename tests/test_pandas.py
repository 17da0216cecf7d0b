"""Tables as pandas data frames: ids stay integers, whatever is null beside them."""

import pyarrow as pa

import kdissect


def is_exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def test_integers_and_booleans_come_back_equal(librdkafka: kdissect.Tables) -> None:
    """Every integer and boolean column of every table, with its nulls, there and back."""
    compared = 0
    found = {name: librdkafka[name] for name in librdkafka}
    found |= {
        "incidents": librdkafka.incidents(),
        "inventory": librdkafka.inventory(),
        "sql": librdkafka.sql("select exchange_id, response_time_ns from exchanges"),
    }
    for name, table in found.items():
        rows, frame = table.to_arrow(), table.to_pandas()
        for field in rows.schema:
            if is_exact(field.type):
                column = pa.Array.from_pandas(frame[field.name], type=field.type)
                assert column.equals(rows[field.name].combine_chunks()), f"{name}.{field.name}"
                compared += 1
    assert compared > 100


def test_a_join_over_nullable_ids_finds_all_rows(librdkafka: kdissect.Tables) -> None:
    """Response packets of exchanges without a response do not blur those of the others."""
    exchanges = librdkafka.exchanges.to_pandas()
    assert exchanges.response_time_ns.isna().any()
    assert str(exchanges.response_time_ns.dtype) == "Int64"
    joined = exchanges.merge(
        librdkafka.captures.to_pandas(), left_on="response_capture_id", right_on="capture_id"
    )
    assert len(joined) == exchanges.response_capture_id.notna().sum()


def test_other_libraries_take_a_table_as_it_is(librdkafka: kdissect.Tables) -> None:
    """Arrow's stream interface gives the rows of the table."""
    assert pa.table(librdkafka.exchanges).equals(librdkafka.exchanges.to_arrow())
    assert librdkafka.exchanges.columns == librdkafka.exchanges.schema.names
    assert len(librdkafka.exchanges.head(3)) == 3


def test_tables_are_a_mapping(librdkafka: kdissect.Tables) -> None:
    """len, keys and items agree with the names."""
    assert len(librdkafka) == len(librdkafka.names) == len(list(librdkafka.keys()))
    assert dict(librdkafka.items())["exchanges"] is librdkafka.exchanges
