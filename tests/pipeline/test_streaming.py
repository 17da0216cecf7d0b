"""readStream.format("kdissect"): each finished exchange once, whatever happens to the files."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kdissect
from kdissect import folder_stream
from kdissect.capture.inputs import InputFile, describe
from kdissect.datasource import KdissectDataSource
from kdissect.folder_stream import FolderStream
from kdissect.pipeline.options import Options
from kdissect.resume.next_window import CarryLimits
from tests.builders.captures import Blocks, pcap_bytes
from tests.builders.frames import request, response
from tests.builders.talks import Talk
from tests.conftest import CAPTURES

COLUMNS = ("exchange_id", "api_name", "correlation_id", "status", "latency_ms", "client_id",
           "request_packet", "response_packet", "response_decode_status")  # fmt: skip
FILE_HEADER = 24
PARTS = 5
LOSS = ("gap", "partial_frame", "response_without_request", "unframed_bytes")


def packets_of(data: bytes) -> list[bytes]:
    """The records of a little-endian pcap file."""
    found, at = [], FILE_HEADER
    while at < len(data):
        end = at + 16 + struct.unpack_from("<I", data, at + 8)[0]
        found.append(data[at:end])
        at = end
    return found


def pcapng(packets: list[bytes], key_log: bytes = b"") -> bytes:
    """The same packets as pcapng, with a key log in front."""
    made = Blocks()
    parts = [made.section(), made.interface(), made.secrets(key_log) if key_log else b""]
    for packet in packets:
        seconds, micros = struct.unpack_from("<II", packet)
        parts.append(made.enhanced(packet[16:], seconds * 1_000_000 + micros))
    return b"".join(parts)


@pytest.fixture(scope="module")
def parts() -> list[bytes]:
    """A capture cut into files, like tcpdump -G does; most connections are in several."""
    data = (CAPTURES / "librdkafka.pcap").read_bytes()
    packets = packets_of(data)
    size = -(-len(packets) // PARTS)
    return [
        data[:FILE_HEADER] + b"".join(packets[at : at + size])
        for at in range(0, len(packets), size)
    ]


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


class Query:
    """Batches of one query, as Spark plans, reads and commits them.

    fails: a failure makes Spark read each batch twice.
    """

    def __init__(
        self, folder: Path, options: Options | None = None, fails: bool = False, **settings: Any
    ) -> None:
        self.fails = fails
        self.made_of = (str(folder), options or Options(), str(folder.parent / "spool"))
        self.settings = settings
        self.at = self.stream().first()

    def stream(self) -> FolderStream:
        """As after a restart."""
        folder_stream._secrets_in.cache_clear()
        return FolderStream(*self.made_of, **self.settings)

    def batch(self) -> dict[str, pa.Table]:
        """The tables of a batch."""
        end = self.stream().latest(self.at)
        if end == self.at:
            return {}
        first = list(self.stream().read(self.at, end))
        again = list(self.stream().read(self.at, end)) if self.fails else first
        assert [part.keys() for part in first] == [part.keys() for part in again]
        for one, other in zip(first, again, strict=True):
            assert all(one[name].equals(other[name]) for name in one)
        self.stream().forget_before(end)
        self.at = end
        names = {name for part in first for name in part}
        return {name: _all([part[name] for part in first if name in part]) for name in names}

    def kinds(self, tables: dict[str, pa.Table]) -> list[str]:
        """Kinds of anomalies, except those of connections with lost packets."""
        kinds = tables["anomalies"]["kind"].to_pylist() if "anomalies" in tables else []
        return [kind for kind in kinds if kind not in LOSS]


def _all(parts: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts, promote_options="permissive")


def _rows(*tables: pa.Table) -> list[tuple[str, ...]]:
    rows = [row for table in tables for row in table.select(list(COLUMNS)).to_pylist()]
    return sorted(tuple(map(str, row.values())) for row in rows)


def _dissected(*paths: Path, **options: Any) -> list[tuple[str, ...]]:
    """Rows of the same files in one run, the oracle."""
    return _rows(kdissect.read(list(map(str, paths)), **options).exchanges.to_arrow())


OPEN = ("response_missing", "connection_closed")  # at the end of a run; a stream goes on there


def test_batches_give_the_rows_of_one_run(folder, put):
    """The exchanges of all batches are those of one run over the complete files."""
    query = Query(folder, fails=True)
    found = []
    for number in range(PARTS):
        put(number)
        tables = query.batch()
        assert (number == 0) == (not tables)  # the newest file waits for the next one
        assert query.kinds(tables) == []
        found += [tables["exchanges"]] if tables else []
    expected = _dissected(*sorted(folder.iterdir())[:-1])
    assert len(_rows(*found)) > 200
    assert set(_rows(*found)) <= set(expected)
    assert {row[3] for row in set(expected) - set(_rows(*found))} <= set(OPEN)
    ids = [row[0] for row in _rows(*found)]
    assert len(ids) == len(set(ids))


def test_the_age_of_files_makes_them_complete(folder, put):
    """With `complete_after_s` an old file is read without a newer one."""
    query = Query(folder, complete_after_s=60)
    put(0, 1)
    assert query.batch() == {}
    os.utime(folder / "part0.pcap", (1, 1))
    first = query.batch()
    os.utime(folder / "part1.pcap", (1, 1))
    second = query.batch()
    assert set(_rows(first["exchanges"], second["exchanges"])) <= set(
        _dissected(folder / "part0.pcap", folder / "part1.pcap")
    )
    assert len(_rows(second["exchanges"])) > 20


def test_hidden_names_are_left_out(folder, put, parts):
    """rsync writes to .NAME.XXXXXX and renames it."""
    put(1)
    (folder / ".part0.pcap.Ab3d").write_bytes(parts[0])
    assert Query(folder).batch() == {}


def test_a_glob_is_a_folder(folder, put):
    """Only matching files are read; a folder that is not there yet is empty."""
    put(0, 1, 2)
    (folder / "other.pcap").write_bytes((CAPTURES / "java_2_0_1.pcap").read_bytes())
    one = Query(folder / "part*.pcap")
    assert [Path(path).name for _, path in one.stream().latest(one.at)["files"]] == [
        "part0.pcap",
        "part1.pcap",
    ]
    none = Query(folder / "none")
    assert none.stream().latest(none.at) == none.at


def test_only_new_files_are_opened(folder, put, monkeypatch):
    """A trigger opens only the new ones of many rotated files."""
    put(0, 1, 2)
    (folder / "notes.txt").write_text("no capture")
    opened: list[str] = []
    monkeypatch.setattr(
        folder_stream, "describe", lambda path: opened.append(Path(path).name) or describe(path)
    )
    query = Query(folder)
    stream = query.stream()
    end = stream.latest(query.at)
    assert sorted(opened) == ["notes.txt", "part0.pcap", "part1.pcap", "part2.pcap"]
    opened.clear()
    assert stream.latest(query.at) == end
    assert not opened
    put(0)  # written again, and later than notes.txt, which is complete by that
    assert end["files"] == stream.latest(query.at)["files"][:-1]
    assert opened == ["part0.pcap"]
    list(pickle.loads(pickle.dumps(stream)).read(query.at, end))  # as a task gets it
    put(3)
    opened.clear()
    stream = pickle.loads(pickle.dumps(stream))
    assert list(stream.read(end, stream.latest(end)))
    assert opened.count("part3.pcap") == opened.count("part1.pcap") == 1


def test_a_late_file_is_read_by_itself(folder, put, caplog):
    """A file that arrives after later ones is read alone, and a row says so."""
    query = Query(folder, fails=True)
    put(0, 2, 3)
    first = query.batch()
    put(1)
    late = query.batch()
    assert query.kinds(late) == ["capture_late"]
    [row] = late["anomalies"].to_pylist()
    assert row["severity"] == "warning"
    assert row["byte_count"] == (folder / "part1.pcap").stat().st_size
    assert "part1.pcap: came after a later capture was read" in row["detail"]
    assert row["detail"] in caplog.messages
    assert _rows(late["exchanges"]) == _dissected(folder / "part1.pcap")
    assert len(_rows(late["exchanges"])) > 30
    put(4)
    rest = query.batch()
    assert query.kinds(rest) == []
    ids = [row[0] for row in _rows(first["exchanges"], late["exchanges"], rest["exchanges"])]
    assert len(ids) == len(set(ids))


def test_a_file_that_grew_is_read_on(folder, put, parts, caplog):
    """Its new packets are read; those before are no rows again; the query goes on."""
    query = Query(folder, fails=True)
    packets = packets_of(parts[0])
    half = len(packets) // 2
    early = folder / "part0.pcap"
    early.write_bytes(parts[0][:FILE_HEADER] + b"".join(packets[:half]) + packets[half][:30])
    put(1, 2)
    first = query.batch()
    assert query.kinds(first) == ["capture_cut"]
    assert "part0.pcap: packet" in first["anomalies"]["detail"][0].as_py()
    put(0)
    grown = query.batch()
    assert query.kinds(grown) == ["capture_grown"]
    [row] = grown["anomalies"].to_pylist()
    assert row["packet"] == half + 1
    assert row["detail"] in caplog.messages
    packets_seen = grown["exchanges"]["request_packet"].to_pylist()
    assert min(number for number in packets_seen if number is not None) > half
    ids = [row[0] for row in _rows(first["exchanges"], grown["exchanges"])]
    assert len(ids) == len(set(ids))
    put(3)
    assert query.kinds(query.batch()) == []


def test_the_last_file_may_grow(folder, put, parts):
    """Nothing later was read, so its connections go on as if it had been whole at once."""
    query = Query(folder, complete_after_s=60)
    packets = packets_of(parts[0])
    half = parts[0][:FILE_HEADER] + b"".join(packets[: len(packets) // 2])
    found = []
    for data in (half, parts[0], parts[0] + b"".join(packets_of(parts[1]))):
        (folder / "growing.pcap").write_bytes(data)
        os.utime(folder / "growing.pcap", (1, 1))
        tables = query.batch()
        assert query.kinds(tables) == []
        found.append(tables["exchanges"])
    expected = _dissected(folder / "growing.pcap")
    assert set(_rows(*found)) <= set(expected)
    assert {row[3] for row in set(expected) - set(_rows(*found))} <= set(OPEN)
    assert query.batch() == {}


def test_a_file_that_was_read_may_move(folder, put, parts, tmp_path):
    """Moved, or compressed by `tcpdump -z gzip`, it has no rows again; a copy says so."""
    query = Query(folder)
    put(0, 1, 2)
    assert query.kinds(query.batch()) == []
    (folder / "part0.pcap.gz").write_bytes(gzip.compress(parts[0]))
    copied = query.batch()
    assert "exchanges" not in copied
    assert query.kinds(copied) == ["capture_repeated"]
    (folder / "done").mkdir()
    (folder / "part1.pcap").rename(folder / "done" / "part1.pcap")
    (folder / "part0.pcap").unlink()
    assert query.batch() == {}
    assert query.batch() == {}


def test_a_ring_of_files_is_read_round_and_round(folder, put, parts):
    """`tcpdump -W` writes to the same names again."""
    query = Query(folder, fails=True)
    found = []
    for number in range(PARTS):
        (folder / f"ring{number % 2}.pcap").write_bytes(parts[number])
        tables = query.batch()
        assert query.kinds(tables) == []
        found += [tables["exchanges"]] if tables else []
    for number, data in enumerate(parts[:-1]):
        (folder.parent / f"{number}.pcap").write_bytes(data)
    expected = _dissected(*(folder.parent / f"{number}.pcap" for number in range(PARTS - 1)))
    kept = {row for row in expected if row[3] not in OPEN}
    assert {row[1:] for row in _rows(*found)} >= {row[1:] for row in kept}


def test_a_file_that_goes_before_it_is_read(folder, put, parts, caplog):
    """A removed or replaced file has an anomaly, and the stream goes on."""
    query = Query(folder)
    put(0, 1, 2, 3)
    end = query.stream().latest(query.at)
    (folder / "part0.pcap").unlink()
    (folder / "part1.pcap").write_bytes(parts[4])
    tables = list(query.stream().read(query.at, end))
    rows = tables[-1]["anomalies"].to_pylist()
    assert [row["kind"] for row in rows] == ["capture_missing"] * 2
    assert "part0.pcap: was gone before it was read" in rows[0]["detail"]
    assert "part1.pcap: was replaced before it was read" in rows[1]["detail"]
    assert [row["detail"] for row in rows] == caplog.messages
    files = query.stream().latest(end)["files"]
    assert [Path(path).name for _, path in files] == ["part3.pcap"]  # the new part1 is the newest


def test_damaged_files_are_anomalies(folder, put, parts, caplog):
    """The rows in front of the damage are there, and a row for it; the query goes on."""
    query = Query(folder)
    packets = packets_of(parts[0])
    damaged = packets[40][:8] + b"\xff" * 8 + packets[40][16:]
    (folder / "part0.pcap").write_bytes(
        parts[0][:FILE_HEADER] + b"".join([*packets[:40], damaged, *packets[41:]])
    )
    put(1, 2, 4)
    for name, data in (
        ("at_once.pcap", parts[0][:FILE_HEADER] + damaged),
        ("header.pcap", b"\0" * 30),
        ("half.pcap.gz", gzip.compress(parts[3])[:2000]),
        ("no_packets.pcap", parts[0][:FILE_HEADER]),
        ("empty.pcap", b""),
    ):
        (folder / name).write_bytes(data)
        os.utime(folder / name, (1, 1))
    tables = query.batch()
    rows = {row["detail"].partition(": ")[0]: row for row in tables["anomalies"].to_pylist()}
    assert {Path(path).name: row["kind"] for path, row in rows.items()} == {
        "part0.pcap": "capture_cut",
        "at_once.pcap": "capture_cut",
        "header.pcap": "not_a_capture",
        "half.pcap.gz": "capture_cut",
    }
    assert {row["detail"] for row in rows.values()} == set(caplog.messages)
    assert "packet 41 at byte" in rows[str(folder / "part0.pcap")]["detail"]
    assert "gzip data is damaged" in rows[str(folder / "half.pcap.gz")]["detail"]
    assert any(row[6].isdigit() and int(row[6]) < 41 for row in _rows(tables["exchanges"]))
    put(3)  # now whole: it goes on where half.pcap.gz broke off
    tables = query.batch()
    assert query.kinds(tables) == []
    assert len(_rows(tables["exchanges"])) > 20


def test_queries_of_one_folder_keep_their_states(folder, put, monkeypatch):
    """Each goes on where it was, without reading files again, whatever the other commits."""
    fast, slow = Query(folder), Query(folder)
    put(0, 1)
    fast.batch()
    slow.batch()
    put(2, 3)
    fast.batch()
    read: list[str] = []
    reader = folder_stream.WindowReader
    monkeypatch.setattr(
        folder_stream,
        "WindowReader",
        lambda path, *rest: read.append(Path(path).name) or reader(path, *rest),
    )
    tables = slow.batch()
    assert sorted(set(read)) == ["part1.pcap", "part2.pcap"]
    assert slow.kinds(tables) == []


def test_state_that_is_gone_is_made_again(folder, put, caplog):
    """The same exchanges, and a row that says so."""
    states, query, other = folder.parent / "spool", Query(folder), Query(folder)
    for some in (query, other):
        put(0, 1)
        some.batch()
    put(2, 3)
    for place in states.rglob(other.at["query"] + "*"):
        raise AssertionError(place)  # the name begins with the format
    [place] = states.rglob(f"*-{other.at['query']}-*")
    assert place.name.startswith(f"{kdissect.__version__}-")
    shutil.rmtree(place)
    other.fails = True
    expected, found = query.batch(), other.batch()
    assert _rows(found["exchanges"]) == _rows(expected["exchanges"])
    assert query.kinds(expected) == []
    assert other.kinds(found) == ["state_lost"]
    assert found["anomalies"]["detail"][0].as_py() in caplog.messages


@pytest.mark.parametrize("how", ["format", "damage"])
def test_state_that_cannot_be_read_is_made_again(how, folder, put, monkeypatch):
    """State of another format, or cut, is rebuilt from the captures."""
    query = Query(folder)
    put(0, 1)
    query.batch()
    put(2)
    if how == "format":  # another version of kdissect wrote it
        monkeypatch.setattr(folder_stream, "__version__", "0.0")
    else:
        [place] = (folder.parent / "spool").rglob(f"*-{query.at['query']}-*/1")
        place.write_bytes(place.read_bytes()[:-100])
    tables = query.batch()
    assert query.kinds(tables) == ["state_lost"]
    assert set(_rows(tables["exchanges"])) <= set(
        _dissected(folder / "part0.pcap", folder / "part1.pcap")
    )


def test_connections_beyond_a_limit_are_counted_in_a_row(folder, monkeypatch, caplog):
    """Their open requests are rows without a response, and a row says how many there are."""
    carry = folder_stream.ConnectionCarry
    limits = CarryLimits(connection_max=1)
    monkeypatch.setattr(
        folder_stream, "ConnectionCarry", lambda *some, **more: carry(*some, limits=limits, **more)
    )
    talks = [Talk(port=40000 + number, start=1000 + 10_000 * number) for number in range(4)]
    for number, talk in enumerate(talks):
        for correlation_id in range(3):
            talk.ask(request(correlation_id))
            talk.answer(response(correlation_id))
        talk.ask(request(3))
        (folder / f"{number}.pcap").write_bytes(pcap_bytes(talk.packets))
    query = Query(folder)
    tables = query.batch()
    assert query.kinds(tables) == ["limit"]
    assert caplog.messages[-1] == tables["anomalies"]["detail"][0].as_py()
    assert caplog.messages[-1].startswith("2 connections were quiet for long")
    assert tables["exchanges"]["status"].to_pylist().count("response_missing") == 2


def test_a_file_that_may_be_read_now(folder, put, monkeypatch):
    """What could not be opened is a row, and is read when its permissions change."""
    put(0, 1)
    monkeypatch.setattr(
        folder_stream,
        "describe",
        lambda path: InputFile(path, "unknown", error="permission denied"),
    )
    stream = Query(folder, complete_after_s=1e-9).stream()
    files = stream.latest(stream.first())["files"]
    assert [time_ns for time_ns, _ in files] == [folder_stream.NO_TIME_YET] * 2
    monkeypatch.undo()
    (folder / "part0.pcap").chmod(0o640)
    assert [
        time_ns < folder_stream.NO_TIME_YET for time_ns, _ in stream.latest(stream.first())["files"]
    ] == [True, False]


def test_offsets_of_another_version_are_refused(folder, put):
    """CaptureError advises a new checkpoint."""
    put(0, 1)
    with pytest.raises(kdissect.CaptureError, match="begin with a new one"):
        Query(folder).stream().latest({"time_ns": 1, "path": "x.pcap"})


@pytest.fixture(scope="module")
def tls() -> tuple[list[bytes], bytes]:
    """The packets of a TLS capture, and its key log."""
    data = gzip.decompress((CAPTURES / "tls13.pcap.gz").read_bytes())
    return packets_of(data), (CAPTURES / "tls13.keylog").read_bytes()


def _tls_files(folder: Path, packets: list[bytes], key_logs: list[bytes]) -> list[Path]:
    size = -(-len(packets) // len(key_logs))
    paths = [folder / f"tls{number}.pcapng" for number in range(len(key_logs))]
    for number, (path, key_log) in enumerate(zip(paths, key_logs, strict=True)):
        path.write_bytes(pcapng(packets[number * size : (number + 1) * size], key_log))
    return paths


@pytest.mark.parametrize(
    "logs", ["first", pytest.param("each", marks=pytest.mark.heavy), "growing"]
)
def test_secrets_inside_a_capture_outlive_its_batch(folder, tls, logs):
    """TLS connections go on in the next batch, and no secret is in the saved state."""
    packets, key_log = tls
    lines = key_log.splitlines(keepends=True)
    key_logs = {
        "first": [key_log, b"", b"", b""],
        "each": [key_log] * 4,
        "growing": [b"".join(lines[: len(lines) // 2]), key_log, key_log, key_log],
    }[logs]
    paths = _tls_files(folder.parent, packets, key_logs)
    query = Query(folder, fails=True)
    found = []
    for path in paths:
        shutil.copy(path, folder)
        tables = query.batch()
        assert query.kinds(tables) == []
        found += [tables["exchanges"]] if tables else []
        _holds_no_secret(folder.parent / "spool", key_log)
    moved = folder.parent / "moved"
    folder.rename(moved)  # ids follow from paths
    moved.rename(folder)
    expected = _dissected(*sorted(folder.iterdir())[:-1])
    assert set(_rows(*found)) <= set(expected)
    missing = set(expected) - set(_rows(*found))
    assert {row[3] for row in missing} <= set(OPEN)
    assert len(_rows(*found)) > 60


def _holds_no_secret(spool: Path, key_log: bytes) -> None:
    states = [path.read_bytes() for path in spool.rglob("*") if path.is_file()]
    for line in key_log.split(b"\n"):
        if line and not line.startswith(b"#"):
            secret = line.split()[2]
            for form in (secret, secret.upper(), bytes.fromhex(secret.decode())):
                assert not any(form in state for state in states)


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
def test_secrets_that_are_gone_are_noted_once(how, folder, tls):
    """Once; a capture that only moved has them still."""
    packets, key_log = tls
    paths = _tls_files(folder.parent, packets, [key_log, b"", b"", b"", b""])
    query = Query(folder)
    for path in paths[:3]:
        shutil.copy(path, folder)
    assert query.kinds(query.batch()) == []
    early, other = folder / "tls0.pcapng", folder / "other.pcapng"
    early.rename(other) if how == "moved" else early.unlink()
    if how == "replaced":  # a ring of files: another capture, which comes late
        early.write_bytes(pcapng(packets[1:3]))
    shutil.copy(paths[3], folder)
    second = query.batch()
    shutil.copy(paths[4], folder)
    third = query.batch()
    assert (
        query.kinds(second)
        == {
            "removed": ["not_decrypted"],
            "replaced": ["not_decrypted", "capture_late"],
            "moved": [],
        }[how]
    )
    assert query.kinds(third) == []
    if how == "moved":
        assert len(_rows(second["exchanges"], third["exchanges"])) > 40
    else:
        assert "tls0.pcapng: its TLS secrets are known no more" in "".join(
            second["anomalies"]["detail"].to_pylist()
        )


def test_a_key_log_longer_than_packets(folder, tls):
    """The first packet is further back than packets are long; the file has its place by it."""
    packets, key_log = tls
    data = pcapng(packets, b"# padding\n" * 20_000 + key_log)
    (folder / "tls.pcapng").write_bytes(data)
    os.utime(folder / "tls.pcapng", (1, 1))
    query = Query(folder, complete_after_s=60)
    tables = query.batch()
    assert set(_rows(tables["exchanges"])) <= set(_dissected(folder / "tls.pcapng"))
    assert len(_rows(tables["exchanges"])) > 100


def test_faults_of_messages_are_anomalies(folder, parts):
    """Like those of a whole run, each with its exchange."""
    packets = packets_of((CAPTURES / "librdkafka.pcap").read_bytes())
    at, changed = _with_a_wrong_crc(packets)
    packets[at] = changed
    (folder / "one.pcap").write_bytes(parts[0][:FILE_HEADER] + b"".join(packets))
    os.utime(folder / "one.pcap", (1, 1))
    query = Query(folder, complete_after_s=60)
    tables = query.batch()
    assert "wrong_crc" in query.kinds(tables)
    expected = kdissect.read(str(folder / "one.pcap")).anomalies.to_arrow()
    by_exchange = [("exchange_id", "ascending"), ("kind", "ascending")]
    assert tables["anomalies"].sort_by(by_exchange) == expected.sort_by(by_exchange)


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
    count = len(talk.packets)
    cuts = [count * number // file_count for number in range(file_count + 1)]
    query, paths, found = Query(folder, complete_after_s=60), [], []
    packets = [talk.packets[low:high] for low, high in pairwise(cuts)]
    for number, part in enumerate([*packets, after.packets]):
        paths.append(folder / f"part{number}.pcap")
        paths[-1].write_bytes(pcap_bytes(part))
        os.utime(paths[-1], (1, 1))
        tables = query.batch()
        found += tables["anomalies"].to_pylist() if "anomalies" in tables else []
    expected = kdissect.read(paths).anomalies.to_arrow().to_pylist()
    assert {row["kind"] for row in expected} >= {"gap", "unframed_bytes"}
    assert sorted(map(str, found)) == sorted(map(str, expected))


def test_connections_that_stay_encrypted_are_anomalies(folder, tls):
    """Those whose secrets are not in the key log, each once, when they are closed."""
    packets, key_log = tls
    lines = key_log.splitlines(keepends=True)
    paths = _tls_files(folder, packets, [b"".join(lines[: len(lines) // 2]), b""])
    after = Talk(40001, 4_000_000_000_000_000)
    after.acknowledge(0)
    paths.append(folder / "after.pcap")
    paths[-1].write_bytes(pcap_bytes(after.packets[-1:]))
    for path in paths:
        os.utime(path, (1, 1))
    found = Query(folder, complete_after_s=60).batch()["anomalies"].to_pylist()
    rows = kdissect.read(paths).anomalies.to_arrow().to_pylist()
    assert {row["kind"] for row in rows} == {"not_decrypted"}
    told, expected = Counter(map(str, found)), Counter(map(str, rows))
    assert told <= expected
    assert expected.total() - told.total() == 2  # which one end alone has closed


def _with_a_wrong_crc(packets: list[bytes]) -> tuple[int, bytes]:
    """A packet with record data, by number, with another value in its last record."""
    for number, packet in enumerate(packets):
        at = packet.find(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
        if at > 0 and len(packet) > at + 100:  # producer id, epoch and sequence of a batch
            return number, packet[:-2] + bytes([packet[-2] ^ 1]) + packet[-1:]
    raise AssertionError("no record batch of a producer without an id")


def test_only_chosen_hosts_and_times(folder, put):
    """Hosts and times select exchanges, as in `read`."""
    put(0, 1, 2)
    whole = Query(folder).batch()["exchanges"]
    some = Query(folder, Options(hosts=("10.9.9.9",))).batch()
    assert "exchanges" not in some
    times = sorted(whole["request_time_ns"].drop_null().to_pylist())
    middle = times[len(times) // 2]
    late = Query(folder, Options(time_from_ns=middle)).batch()["exchanges"]
    assert 0 < late.num_rows < whole.num_rows
    assert min(late["request_time_ns"].drop_null().to_pylist()) >= middle


def _reader(path: Path, **options: str) -> Any:
    source = KdissectDataSource({"path": str(path), "spool": str(path.parent / "spool"), **options})
    return source.streamReader(source.schema())


def test_a_query_that_restarts(folder, put):
    """As Spark 4.1 calls a reader: without a start, and with an empty batch after a restart."""
    put(0, 1)
    reader = _reader(folder)
    start, end = reader.initialOffset(), reader.latestOffset()
    [partition] = reader.partitions(start, end)
    assert list(reader.read(partition))
    # it ends before Spark knows that the batch is done, which is then read once more
    reader = _reader(folder)
    assert reader.partitions(end, end) == []
    [partition] = reader.partitions(reader.initialOffset(), end)
    assert list(reader.read(partition))
    reader.commit(end)
    assert reader.latestOffset() == end
    put(2)
    reader = _reader(folder)
    assert reader.partitions(end, end) == []
    assert reader.latestOffset() == reader.latestOffset(end, None)
    assert [Path(path).name for _, path in reader.latestOffset()["files"]] == ["part1.pcap"]


def test_options_of_streams(folder, put):
    """Options have the names and checks of the reader."""
    put(0, 1)
    reader = _reader(folder, completeAfter="0.000001", table="anomalies")
    assert len(reader.latestOffset()["files"]) == 2
    assert (
        reader._schema.names
        == kdissect.read(folder / "part0.pcap").anomalies.to_arrow().schema.names
    )
    assert len(_reader(folder / "part*.pcap").latestOffset()["files"]) == 1
    for text in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="completeAfter is a number of seconds above 0"):
            _reader(folder, completeAfter=text)
    with pytest.raises(kdissect.CaptureError, match="a stream reads a folder or glob"):
        _reader(folder / "none")
    with pytest.raises(ValueError, match="a stream has no table connections: it has exchanges"):
        _reader(folder, table="connections")


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_streams_a_folder_exactly_once(spark, folder, put, tmp_path):
    """Two queries on one folder, both restarted from their checkpoints."""
    kdissect.register(spark)

    def run(table: str) -> pa.Table:
        frame = (
            spark.readStream.format("kdissect").option("table", table)
            .option("spool", str(tmp_path / "spool")).load(str(folder))
        )  # fmt: skip
        out = str(tmp_path / table)
        query = (
            frame.writeStream.format("parquet").option("path", out)
            .option("checkpointLocation", str(tmp_path / f"{table}-checkpoint")).start()
        )  # fmt: skip
        query.processAllAvailable()
        query.stop()
        return spark.read.parquet(out).toArrow()

    direct, expected = Query(folder), []
    put(0, 2, 3)
    first = run("exchanges")
    assert run("anomalies").num_rows == 0
    expected.append(direct.batch()["exchanges"])
    put(1, 4)
    found, anomalies = run("exchanges"), run("anomalies")
    expected.append(direct.batch()["exchanges"])
    assert 0 < first.num_rows < found.num_rows
    assert _rows(found) == _rows(*expected)
    assert anomalies["kind"].to_pylist() == ["capture_late"]
