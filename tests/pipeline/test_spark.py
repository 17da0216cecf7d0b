"""The run on Spark gives the rows of the run in process, whatever happens to its workers."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kdissect
from bench.measure import family
from kdissect.pipeline import spark as spark_run
from kdissect.pipeline import task_table
from kdissect.pipeline.set_folder import STAGING
from tests.builders.captures import Blocks, read_packets
from tests.cases import cases
from tests.material import needs_material
from tests.truth.material import Capture
from tests.truth.rows import set_differences

pytestmark = pytest.mark.spark


@cases("split_bytes", [100_000], heavy=[None])
def test_spark_gives_the_rows_of_read(
    spark: Any, captures: Path, tmp_path: Path, split_bytes: int | None
) -> None:
    """All tables are equal as sets of rows, types included, also with many small splits."""
    paths = [captures / "librdkafka.pcap", captures / "sarama.pcap.gz"]
    here = kdissect.read(paths)
    there = kdissect.dissect(spark, paths, tmp_path / "out", split_bytes=split_bytes)
    for found in (there, kdissect.open(tmp_path / "out"), here.write(tmp_path / "written")):
        assert set_differences(here, found) == []


def test_tables_that_grow_lie_beside_the_run(
    spark: Any, captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks read inputs, the places of key logs and names of topics from files of the run, and
    merge the facts."""
    monkeypatch.setattr(task_table, "TABLE_BYTES", 0)
    monkeypatch.setattr(spark_run, "FACT_TASKS", 2)
    made = Blocks()
    data = [made.section(), made.interface(resolution=9)]
    data.append(made.secrets((captures / "tls13.keylog").read_bytes()))
    packets = read_packets(captures / "tls13.pcap.gz")
    data += [made.enhanced(packet.data, packet.time_ns) for packet in packets]
    (tmp_path / "tls.pcapng").write_bytes(b"".join(data))
    paths = [tmp_path / "tls.pcapng", captures / "librdkafka.pcap"]
    here = kdissect.read(paths)
    for split_bytes in (100_000, 300_000):  # with so few tasks the driver merges the facts
        out = tmp_path / str(split_bytes)
        there = kdissect.dissect(spark, paths, out, split_bytes=split_bytes)
        assert set_differences(here, there) == []
        assert not (out / STAGING).exists()


@pytest.mark.heavy
@needs_material
@pytest.mark.parametrize(
    ("name", "split_bytes"), [("java_latest/java_latest", 700_000), ("sasl/sasl", 100_000)]
)
def test_recorded_captures_on_spark(
    spark: Any, tmp_path: Path, name: str, split_bytes: int
) -> None:
    """Larger captures and secrets, with splits through connections."""
    path = Capture(name).path
    options = {"reveal_secrets": True, "split_bytes": split_bytes}
    there = kdissect.dissect(spark, path, tmp_path / "out", **options)
    assert set_differences(Capture(name).tables, there) == []


@pytest.mark.heavy
def test_spark_gives_the_incidents_of_read(spark: Any, captures: Path, tmp_path: Path) -> None:
    """The incidents of a set that Spark wrote are those of the captures, evidence included."""
    paths = sorted((captures / "incidents").glob("*.pcap.gz"))
    there = kdissect.dissect(spark, paths, tmp_path / "out").incidents()
    assert there.num_rows >= len(paths) / 2
    assert there.to_pylist() == kdissect.read(paths).incidents().to_pylist()


def _kill_workers() -> list[int]:
    """Kill the Python workers of the tasks of this process's session: forks of a daemon.

    Other tests have sessions too. The workers of the planner have a daemon of their own. Spark
    keeps idle ones for the next query and does not start a query again whose planner died, so they
    stay alive.
    """
    killed = []
    for pid in family(os.getpid()):
        with suppress(OSError):  # it has ended
            if b"pyspark.daemon\0pyspark.worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                for worker in family(pid)[1:]:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
    return killed


def test_killed_workers_cost_nothing(spark: Any, captures: Path, tmp_path: Path) -> None:
    """Workers killed in the middle of the decode stage: no duplicate and no missing row."""
    paths = [captures / "librdkafka.pcap", captures / "java_2_0_1.pcap"]
    out = tmp_path / "out"
    killed: list[int] = []

    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.002):
            # an attempt's folder appears when its decode task begins
            if list(out.glob(f"{STAGING}/*/s*")):
                killed.extend(_kill_workers())
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    tables = kdissect.dissect(spark, paths, out)
    over.set()
    killer.join()
    assert killed, "no worker was found in time"
    assert set_differences(kdissect.read(paths), tables) == []
    assert not (out / STAGING).exists()
