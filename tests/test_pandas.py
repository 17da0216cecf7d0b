"""Tables as pandas data frames: ids stay integers, whatever is null beside them."""

import pyarrow as pa
import pyarrow.dataset as pads

import kdissect


def exact_fields(kind: pa.DataType) -> int:
    """How many integers and booleans a type has, those inside of lists and structs too."""
    if pa.types.is_nested(kind):
        return sum(exact_fields(kind.field(number).type) for number in range(kind.num_fields))
    return int(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def test_integers_and_booleans_come_back_equal(librdkafka: kdissect.Tables) -> None:
    """Every integer and boolean field of every table, with its nulls, there and back."""
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
            if count := exact_fields(field.type):
                column = pa.Array.from_pandas(frame[field.name], type=field.type)
                assert column.equals(rows[field.name].combine_chunks()), f"{name}.{field.name}"
                compared += count
    assert compared > 700


def test_large_integers_beside_a_null() -> None:
    """In a list and in a struct they stay as they are, where a float would round them."""
    large = 2**62 + 1
    rows = pa.table({"ids": [[large, None], [None, large]], "of": [{"id": None}, {"id": large}]})
    frame = kdissect.Table("rows", pads.dataset(rows)).to_pandas()
    assert [list(ids) for ids in frame.ids] == [[large, None], [None, large]]
    assert list(frame.of) == [{"id": None}, {"id": large}]


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
