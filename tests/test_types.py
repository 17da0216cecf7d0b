"""A type checker sees the real types of the package's names."""

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[1]
USES = """
from pyspark.sql import DataFrame, SparkSession

import kdissect

spark: SparkSession
t: kdissect.Tables = kdissect.read("a.pcap", ports=[9092])
d: DataFrame = kdissect.stream(spark, "captures/", late="1m", ports=9092, keylog=["keys"])
n: int = len(kdissect.open("out")["exchanges"])
v: str = t.readiness("4.0")["verdict"]
m: kdissect.Message = kdissect.decode_message(b"", side="request")
kdissect.read(1, nonsense=3)
kdissect.read("a.pcap").exchanges.head("3")
kdissect.read("a.pcap").exchangs
kdissect.stream(spark, "captures/", nonsense=2)
kdissect.stream(spark, "captures/", ports="many")
kdissect.nothing_of_ours()
x: int = kdissect.decode_message(b"", side="request")
kdissect.decode_message(b"", side="neither")
kdissect.read("a.pcap", payload="everything")
kdissect.read("a.pcap", decode_values="avro")
kdissect.dissect(spark, "captures/", "out", partition_by="month")
kdissect.publish(spark, "out", "lake.kafka", format="hudi")
"""
WRONG = range(12, 24)  # lines


def test_checkers_of_users_read_the_types() -> None:
    """They look for the marker of PEP 561 in an installed package."""
    assert (ROOT / "kdissect" / "py.typed").is_file()


def test_mypy_tells_right_uses_from_wrong_ones(tmp_path: Path) -> None:
    """Each wrong line is named, and no right one."""
    uses = tmp_path / "uses.py"
    uses.write_text(USES.removeprefix("\n"))
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    output, errors, _ = api.run([*config, *cache, "--no-error-summary", str(uses)])
    assert not errors
    lines = {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line}
    assert lines == {line - 1 for line in WRONG}, output
