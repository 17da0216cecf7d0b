"""Publishes table sets into a catalogue, in a process of its own: its JVM needs the format's jars.

Arguments: iceberg or delta, the catalogue's name, a folder, and settings of Spark as KEY=VALUE.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import kdissect
from kdissect import catalogue
from kdissect.pipeline.spark_session import session
from kdissect.sql.database import view_name
from tests.conftest import CAPTURES
from tests.truth.rows import as_rows, differences


def assert_equal(spark: SparkSession, into: str, written: list[kdissect.Tables]) -> None:
    """The catalogue's tables have the rows of these sets, each under a run_id of its own."""
    runs = {}  # path of the first capture -> run_id
    for row in spark.table(f"{into}.captures").collect():
        runs[row["path"]] = row["run_id"]
    assert len(runs) == len(written) == len(set(runs.values()))
    names = {name for tables in written for name in tables.names}
    found = {row["tableName"] for row in spark.sql(f"SHOW TABLES IN {into}").collect()}
    assert found == {view_name(name) for name in names}
    for name in sorted(names):
        rows = spark.table(f"{into}.{view_name(name)}").toArrow()
        total = 0
        for tables in written:
            run_id = runs[tables.captures.to_arrow(["path"])["path"][0].as_py()]
            if name not in tables:
                continue
            expected = tables[name].to_arrow()
            of_run = rows.filter(pc.field("run_id") == run_id).select(expected.schema.names)
            total += expected.num_rows
            of_run = of_run.cast(expected.schema)  # Iceberg has no integers below 32 bits
            assert differences(name, as_rows(expected), as_rows(of_run)) == []
        assert rows.num_rows == total, name


def main(format: str, name: str, folder: Path, conf: dict[str, str]) -> None:
    into = f"{name}.kafka"
    spark = session("local[2]", conf, folder / "spark.log")
    names = ["sarama.pcap.gz", "kafkajs.pcap.gz"]
    options = [{}, {"payload": "hash", "decode_values": "string"}]
    sets, read = [folder / "first", folder / "day=2"], []
    for capture, of_run, out in zip(names, options, sets, strict=True):
        read.append(kdissect.read(CAPTURES / capture, **of_run))
        kdissect.dissect(spark, CAPTURES / capture, out, **of_run)

    def fails(table: str) -> str:
        if table == "exchanges":
            raise RuntimeError("the driver is lost")
        return view_name(table)

    with patch.object(catalogue, "view_name", fails), pytest.raises(RuntimeError):
        kdissect.publish(spark, sets[0], into, format=format)
    changed = kdissect.publish(spark, sets[0], into, format=format)
    assert changed[0] == f"{into}.exchanges"
    assert changed[-1] == f"{into}.captures"
    assert_equal(spark, into, read[:1])
    assert kdissect.publish(spark, sets[0], into, format=format) == []
    kdissect.publish(spark, sets[1], into, format=format)
    assert kdissect.publish(spark, sets[1], into, format=format) == []
    assert_equal(spark, into, read)
    spark.stop()


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], Path(sys.argv[3]),
        dict(item.split("=", 1) for item in sys.argv[4:]),
    )  # fmt: skip
