"""kdissect.stream: the rows of one run, whenever and however the files of a folder come."""

import gzip
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kdissect
from kdissect import folder_stream
from kdissect.resume.carry import CarryLimits
from kdissect.resume.open_connection import from_table
from kdissect.tables.arrow_arrays import unpacked
from tests.builders.captures import Blocks, split_capture, write_packets
from tests.builders.frames import request, response
from tests.builders.talks import Talk
from tests.conftest import CAPTURES
from tests.pipeline.micro_batches import Query

COLUMNS = ("exchange_id", "api_name", "correlation_id", "status", "latency_ms", "client_id",
           "queued_ms", "topics", "request_packet", "response_packet", "request_capture_id",
           "response_decode_status")  # fmt: skip
PARTS = 5
OPEN = ("response_missing", "connection_closed")  # at the end of a run; a stream goes on there


@pytest.fixture(autouse=True)
def _few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has work in each bucket, as in a stream of many connections."""
    monkeypatch.setattr(folder_stream, "BUCKETS", 4)


@pytest.fixture(scope="module")
def parts() -> list[bytes]:
    """A capture cut into files, like tcpdump -G does; most connections are in several."""
    head, packets = split_capture((CAPTURES / "librdkafka.pcap").read_bytes())
    cuts = [len(packets) * number // PARTS for number in range(PARTS + 1)]
    return [head + b"".join(packets[low:high]) for low, high in pairwise(cuts)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "captures"
    made.mkdir()
    return made


@pytest.fixture
def put(folder: Path, parts: list[bytes]):
    """Puts some of the parts into the folder."""

    def write(*numbers: int) -> None:
        for number in numbers:
            (folder / f"part{number}.pcap").write_bytes(parts[number])

    return write


def _rows(*tables: pa.Table) -> list[tuple[str, ...]]:
    rows = [row for table in tables for row in table.select(list(COLUMNS)).to_pylist()]
    return sorted(tuple(map(str, row.values())) for row in rows)


def _check(found: list[pa.Table], *paths: Path, **options: Any) -> None:
    """Check that the rows are those of one run; only open exchanges are missing."""
    expected = _rows(kdissect.read(paths, **options).exchanges.to_arrow())
    rows = _rows(*found)
    missing = Counter(expected) - Counter(rows)
    assert not Counter(rows) - Counter(expected)
    assert all(row[3] in OPEN or row[-1] != "ok" for row in missing)
    assert len(rows) > len(expected) * 0.9


# -- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [["0", "1", "2", "3", "4"], ["01234"], ["0", "2", "1", "3", "4"], ["023", "1", "4"]]
)
def test_batches_give_the_rows_of_one_run(order, folder, put):
    """Files in their order, all at once, and a late one, in three tasks a batch."""
    query, found = Query(folder), []
    for numbers in order:
        put(*map(int, numbers))
        found.append(query.batch())
    assert all(table.num_rows for table in found)
    assert query.late_packets == 0
    _check(found, *sorted(folder.iterdir()))


def test_what_is_contiguous_is_a_row_at_once(folder, put):
    """Connections without a gap do not wait for a late file."""
    query = Query(folder)
    put(0, 2)
    found = query.batch()
    whole = _rows(kdissect.read([folder / "part0.pcap"]).exchanges.to_arrow())
    assert {row for row in whole if row[3] == "paired"} <= set(_rows(found))


def test_packets_of_a_file_that_is_too_late_are_counted(folder, put):
    """Beyond the lateness: in `anomalies`, and in the metric of the query's progress."""
    queries = [Query(folder, table, "500ms") for table in ("exchanges", "anomalies")]
    for numbers in ((0,), (2,), (3,), (4,), (1,)):
        put(*numbers)
        tables = [query.batch() for query in queries]
    rows = [row for row in tables[1].to_pylist() if row["kind"] == "late_packets"]
    counts = [int(row["detail"].split()[0]) for row in rows]
    assert sum(counts) == queries[0].late_packets == queries[1].late_packets > 0
    assert "came when the rows that they belong to were complete" in rows[0]["detail"]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_grows_until_the_next_one_comes(compressed, folder, put, parts):
    """Its new packets are read with the next file; also if it was compressed then."""
    query, found = Query(folder), []
    head, packets = split_capture(parts[0])
    early = folder / "part0.pcap"
    half = head + b"".join(packets[: len(packets) // 2]) + packets[len(packets) // 2][:30]
    for data in (half, parts[0]):
        early.write_bytes(data)
        found.append(query.batch())
    if compressed:
        early.unlink()
        (folder / "part0.pcap.gz").write_bytes(gzip.compress(parts[0]))
    put(1)
    found.append(query.batch())
    put(2, 3, 4)
    found.append(query.batch())
    assert [table.num_rows > 0 for table in found] == [True, False, True, True]
    if not compressed:
        _check(found, *sorted(folder.iterdir()))
    ids = [row[0] for row in _rows(*found)]
    assert len(ids) == len(set(ids)) > 300


def test_names_are_ordered_by_their_numbers(folder, parts):
    """`tcpdump -C` writes name, name1, ... name10; the file before name10 is name9."""
    head, packets = split_capture(parts[0])
    (folder / "name9").write_bytes(head + b"".join(packets[:20]))
    query = Query(folder)
    first = query.batch()
    (folder / "name9").write_bytes(parts[0])
    (folder / "name10").write_bytes(parts[1])
    _check([first, query.batch()], folder / "name9", folder / "name10")


def test_hidden_names_are_left_out(folder, put, parts):
    """rsync writes to .NAME.XXXXXX and renames it."""
    (folder / ".part0.pcap.Ab3d").write_bytes(parts[0])
    put(1)
    _check([Query(folder).batch()], folder / "part1.pcap")
    assert Query(folder / "*.other").batch().num_rows == 0


def test_damaged_files_are_anomalies(folder, put, parts):
    """The rows in front of the damage are there, and a row for it; the newest may be complete
    later."""
    head, packets = split_capture(parts[0])
    damaged = packets[40][:8] + b"\xff" * 8 + packets[40][16:]
    (folder / "part0.pcap").write_bytes(head + b"".join([*packets[:40], damaged, *packets[41:]]))
    put(1)
    (folder / "header.pcap").write_bytes(b"\0" * 30)
    (folder / "half.pcap.gz").write_bytes(gzip.compress(parts[3])[:2000])
    (folder / "z.pcap").write_bytes(parts[4][:-9])
    rows = Query(folder, "anomalies").batch().to_pylist()
    faults = {row["detail"].partition(": ")[0]: row for row in rows if str(folder) in row["detail"]}
    assert {Path(path).name: row["kind"] for path, row in faults.items()} == {
        "part0.pcap": "capture_cut",
        "header.pcap": "not_a_capture",
        "half.pcap.gz": "capture_cut",
    }
    assert "packet 41 at byte" in faults[str(folder / "part0.pcap")]["detail"]
    packets_read = Query(folder).batch()["request_packet"].to_pylist()
    assert any(number is not None and number < 41 for number in packets_read)


def test_a_file_that_is_gone_is_an_anomaly(folder, put, monkeypatch):
    """Spark has named it, but a task does not find it."""
    put(0, 1)
    query, listed = Query(folder, "anomalies"), folder_stream.listed
    names = iter([listed(str(folder)), *[[str(folder / "part1.pcap")]] * 3])
    monkeypatch.setattr(folder_stream, "listed", lambda _: next(names))
    rows = query.batch().to_pylist()
    assert [row["kind"] for row in rows if "part0" in row["detail"]] == ["capture_missing"]


# -- connections ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls() -> tuple[bytes, list[bytes]]:
    return split_capture(gzip.decompress((CAPTURES / "tls13.pcap.gz").read_bytes()))


def test_tls_goes_on_from_file_to_file(folder, tls):
    """With a key log; no state has a secret of it."""
    head, packets = tls
    keylog = CAPTURES / "tls13.keylog"
    query, found = Query(folder, keylog=(str(keylog),)), []
    for number in range(3):
        some = packets[len(packets) * number // 3 : len(packets) * (number + 1) // 3]
        (folder / f"{number}.pcap").write_bytes(head + b"".join(some))
        found.append(query.batch())
    _check(found, *sorted(folder.iterdir()), keylog=keylog)
    states = b"".join(state.value[0] for state in query.connections.values())
    secrets = [line.split()[-1] for line in keylog.read_bytes().splitlines() if line[:1] != b"#"]
    assert not any(bytes.fromhex(secret.decode()) in states for secret in secrets)


def test_secrets_inside_a_capture_are_not_read(folder, tls):
    """A row says so."""
    made = Blocks()
    blocks = [made.section(), made.interface()]
    blocks.append(made.secrets((CAPTURES / "tls13.keylog").read_bytes()))
    for packet in tls[1]:
        seconds, micros = struct.unpack_from("<II", packet)
        blocks.append(made.enhanced(packet[16:], seconds * 1_000_000 + micros))
    for name in ("a.pcapng", "b.pcapng"):
        (folder / name).write_bytes(b"".join(blocks))
    rows = Query(folder, "anomalies").batch().to_pylist()
    assert ["a.pcapng: has TLS secrets" in row["detail"] for row in rows].count(True) == 1


@pytest.mark.parametrize("file_count", [1, 7])
def test_faults_of_streams_are_anomalies(file_count, folder):
    """Those of a whole run, each once, as soon as no later packet changes them."""
    talk = Talk()
    for number in range(12):
        talk.ask(request(number) if number != 8 else b"\xff" * 40)
        talk.answer(response(number), keep=number not in (2, 5))
    talk.close()
    after = Talk(40001, talk.time + 5_000_000)
    after.ask(request(1))
    cuts = [len(talk.packets) * number // file_count for number in range(file_count + 1)]
    query, paths, found = Query(folder, "anomalies", "1s"), [], []
    packets = [talk.packets[low:high] for low, high in pairwise(cuts)]
    for number, part in enumerate([*packets, after.packets]):
        paths.append(write_packets(folder / f"part{number}.pcap", part))
        found += query.batch().to_pylist()
    expected = kdissect.read(paths).anomalies.to_pylist()
    assert {row["kind"] for row in expected} >= {"gap", "unframed_bytes"}
    assert sorted(map(str, found)) == sorted(map(str, expected))


def test_connections_beyond_a_limit_are_counted(folder, monkeypatch):
    """Their open requests are rows without a response, and a row says how many there are."""
    monkeypatch.setattr(folder_stream, "BUCKETS", 1)
    monkeypatch.setattr("kdissect.resume.carry.CarryLimits", lambda: CarryLimits(connection_max=1))
    for number in range(4):
        talk = Talk(port=40000 + number, start=1000 + 10_000 * number)
        for correlation_id in range(3):
            talk.exchange(correlation_id)
        talk.ask(request(3))
        write_packets(folder / f"{number}.pcap", talk.packets)
    queries = [Query(folder, table) for table in ("exchanges", "anomalies")]
    for name in range(5, 7):
        talk = Talk(port=40000 + name, start=100_000 * name)
        talk.ask(request(1))
        tables = [query.batch() for query in queries]
        write_packets(folder / f"{name}.pcap", talk.packets)
    tables = [query.batch() for query in queries]
    assert "response_missing" in tables[0]["status"].to_pylist()
    assert "carry_limit" in tables[1]["kind"].to_pylist()


def test_topics_beyond_a_limit_are_counted(folder, put, monkeypatch):
    """In `anomalies`, once for all buckets."""
    query = Query(folder, "anomalies")
    put(*range(PARTS))
    monkeypatch.setattr(folder_stream, "TOPICS_MAX", 0)
    limits = [row for row in query.batch().to_pylist() if row["kind"] == "limit"]
    (count,) = [int(row["detail"].split()[0]) for row in limits]
    names = set(kdissect.read(folder).topics.to_arrow()["topic"].to_pylist())
    assert count >= len(names) > 0


def test_a_closed_connection_leaves_no_state(folder):
    """Its bytes go when it is complete, and it is forgotten a minute later."""
    query = Query(folder, late="1s")
    for number in range(3):
        talk = Talk(40000 + number, number * 40_000_000)
        talk.exchange(1)
        talk.close()
        write_packets(folder / f"{number}.pcap", talk.packets)
        query.batch()
    saved = [from_table(unpacked(state.value[0])[1]) for state in query.connections.values()]
    sizes = {int(one.row["endpoints"]["port_a"][0]): one.size for some in saved for one in some}
    assert sizes.keys() == {40001, 40002}
    assert sizes[40001] == 0


# -- options --------------------------------------------------------------------------------


def test_only_chosen_hosts_and_times(folder, put):
    """Hosts and times select exchanges, as in `read`."""
    put(0, 1, 2)
    whole = Query(folder).batch()
    assert Query(folder, hosts=("10.9.9.9",)).batch().num_rows == 0
    times = sorted(whole["request_time_ns"].drop_null().to_pylist())
    middle = times[len(times) // 2]
    late = Query(folder, time_from_ns=middle).batch()
    assert 0 < late.num_rows < whole.num_rows
    assert min(late["request_time_ns"].drop_null().to_pylist()) >= middle


def test_columns_that_an_option_adds(folder, put):
    """The rows of `records` have the decoded values, as in `read`."""
    put(0, 1, 2)
    found = Query(folder, "records", decode_values="string").batch()
    whole = kdissect.read(folder, decode_values="string").records.to_arrow()
    assert found.column_names == whole.column_names


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"table": "connections"}, ValueError, "a stream has no table connections: it has"),
        ({"late": "soon"}, ValueError, "is no duration"),
        ({"folder": "none"}, kdissect.CaptureError, "a stream reads a folder or glob"),
        ({"colour": "red"}, TypeError, "colour"),
        ({"payload": "some"}, ValueError, "payload must be one of"),
        ({"partition_by": "day"}, ValueError, "use writeStream.partitionBy"),
    ],
)
def test_wrong_arguments_raise_an_error(call, error, words, tmp_path):
    """Before Spark is asked for anything."""
    with pytest.raises(error, match=words):
        kdissect.stream(None, **{"folder": tmp_path, **call})


def test_a_checkpoint_of_another_version_is_refused(folder, put):
    """The error advises a new one."""
    query = Query(folder)
    put(0)
    query.batch()
    for state in query.connections.values():
        state.value = (state.value[0][:-1], state.value[1])
    put(1)
    with pytest.raises(kdissect.CaptureError, match="begin with a new one"):
        query.batch()


@pytest.fixture
def run(spark, folder, tmp_path):
    """Runs the query over the folder until it has read all files, each time from its checkpoint;
    returns the rows so far, and the progress of its micro-batches."""
    tasks = ("spark.sql.files.minPartitionNum", "spark.sql.shuffle.partitions")
    before = [spark.conf.get(name, None) for name in tasks]
    for name in tasks:
        spark.conf.set(name, "3")

    def to_the_end(**options: str) -> tuple[pa.Table, list[Any]]:
        query = (
            kdissect.stream(spark, folder, **options).writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        )  # fmt: skip
        try:
            query.processAllAvailable()
            progress = query.recentProgress
        finally:
            query.stop()
        states = [state for one in progress for state in one.stateOperators]
        assert {state.numShufflePartitions for state in states} == {3}  # tasks
        return spark.read.parquet(str(tmp_path / "rows")).toArrow(), progress

    yield to_the_end
    for name, value in zip(tasks, before, strict=True):
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def _late_packets(progress: list[Any]) -> int:
    return sum(one.observedMetrics["kdissect exchanges"].late_packets or 0 for one in progress)


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_streams_a_folder_exactly_once(folder, parts, put, run):
    """A late and a grown file, three tasks a batch, a restart from the checkpoint after each."""
    put(0, 2)
    half = split_capture(parts[3])
    (folder / "part3.pcap").write_bytes(half[0] + b"".join(half[1][:100]))
    first, _ = run()
    put(1, 3)
    put(4)
    found, progress = run()
    assert 0 < first.num_rows < found.num_rows
    _check([found], *sorted(folder.iterdir()))
    assert _late_packets(progress) == 0


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_counts_packets_that_are_too_late(put, run):
    """The progress of the query names them."""
    put(0, 2, 3, 4)
    run(late="500ms")
    put(1)
    _, progress = run(late="500ms")
    assert _late_packets(progress) > 0
