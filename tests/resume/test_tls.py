"""TLS over a cut: decryption resumes by record number, and no state has a secret."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import kdissect
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ENDPOINTS
from kdissect.capture.windows import WindowReader
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.options import StreamOptions
from kdissect.pipeline.step_rows import STATE_OPEN
from kdissect.resume.carry import ConnectionCarry
from kdissect.resume.open_connection import OpenConnection, from_table, new_connection, to_table
from kdissect.resume.progress import LOOKED_AT_MAX, TLS_HANDSHAKE_BYTES
from kdissect.tables import arrow_arrays
from kdissect.tls.session import GENERATION_MAX, RecordPoint, Session, TlsState
from tests.builders.captures import Blocks, lose_packets, write_packets
from tests.builders.frames import request, response
from tests.builders.talks import BROKER, CLIENT, Playbook
from tests.builders.tls_talk import Parties, Sealer, TlsTalk
from tests.cases import cases
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.pipeline.appending import check, check_cuts, counted, rotated, saved_bytes

SIZES = (5, 100, 2000, 20_000)
RECORD_MAX = 5 + 16384 + 256
KINDS = {
    "1.3": ("TLSv1_3", None),
    "1.3 traffic secrets": ("TLSv1_3", None),
    "1.3 key updates": ("TLSv1_3", None),
    "1.3 mutual": ("TLSv1_3", None),
    "1.3 resumed": ("TLSv1_3", None),
    "1.2": ("TLSv1_2", None),
    "1.2 mutual": ("TLSv1_2", None),
    "1.2 resumed": ("TLSv1_2", None),
    "1.2 CBC": ("TLSv1_2", "AES128-SHA"),
    "1.2 encrypt then MAC": ("TLSv1_2", "ECDHE-RSA-AES256-SHA384"),
}
QUICK = ("1.3 key updates", "1.2 mutual")


def _exchange(number: int) -> tuple[bytes, bytes]:
    size = SIZES[number % 4]
    return request(number, body=b"?" * size), response(number, body=b"!" * (20_005 - size))


def _conversation(kind: str, folder: Path, count: int = 8) -> tuple[Playbook, bytes]:
    """A conversation of requests, each after the response before, and its key log."""
    version, ciphers = KINDS[kind]
    ciphers = ciphers and ciphers + ":@SECLEVEL=0"
    parties = Parties(folder, version, ciphers, is_mutual="mutual" in kind)
    session = None
    if "resumed" in kind:
        first = TlsTalk(parties)
        first.exchange(0)
        session = first.client.session
    talk = TlsTalk(parties, session)
    assert "resumed" not in kind or talk.client.session_reused
    if "updates" in kind:
        return _with_key_updates(talk, parties.key_log(), count), parties.key_log()
    for number in range(count):
        asked, answered = _exchange(number)
        talk.say(CLIENT, asked)
        talk.say(BROKER, answered)
    lines = parties.key_log().splitlines(keepends=True)
    if "traffic" in kind:
        lines = [line for line in lines if b"HANDSHAKE" not in line]
    return talk.playbook(size=1400), b"".join(lines)


def _with_key_updates(talk: TlsTalk, log: bytes, count: int) -> Playbook:
    """Each side changes its key after every second and third message."""
    book = talk.playbook()
    sealers = [
        Sealer(log, label, 0) for label in (b"CLIENT_TRAFFIC_SECRET_0", b"SERVER_TRAFFIC_SECRET_0")
    ]
    sealers[BROKER].number = 2  # after the session tickets
    for number in range(count):
        for side, message in zip((CLIENT, BROKER), _exchange(number), strict=True):
            data = b"".join(
                sealers[side].seal(message[at : at + 9000]) for at in range(0, len(message), 9000)
            )
            if number % (2 + side) == 0:
                data += sealers[side].update()
            book.send(side, data)
    return book


def _secrets(log: bytes) -> list[bytes]:
    """The secrets of a key log, in hexadecimal and as they are."""
    found = [line.split()[-1] for line in log.splitlines() if not line.startswith(b"#")]
    return found + [bytes.fromhex(secret.decode()) for secret in found]


class Run:
    """Windows of a packet each, and the state after each of them, saved and read again."""

    def __init__(self, path: Path, key_log: bytes) -> None:
        self.paths = [str(path)]
        self.resumed = ConnectionCarry(StreamOptions(), [key_log] if key_log else [])

    def rows(self) -> Iterator[tuple[int, list[tuple[int, ...]], OpenConnection | None, bytes]]:
        """After each window: packets so far, complete exchanges, the state, and it as bytes."""
        reader = WindowReader(self.paths[0], 0, self.paths)
        count = 0
        for window in reader.windows():
            found = self.resumed.add(window.batch, window.sources)
            rows = _rows(found.assembly.exchanges)
            state = next(iter(self.resumed.connections()), None)
            packed = b""
            if state is not None and state.protocol is Protocol.KAFKA:
                packed = arrow_arrays.packed(STATE_OPEN, to_table([state]))
                (again,) = from_table(arrow_arrays.unpacked(packed)[1])
                assert (again.tls, again.data) == (state.tls, state.data)
                assert again.segments.tobytes() == state.segments.tobytes()
            count = max(count, int(window.batch.segments["packet"].max(initial=0)))
            yield count, rows, state, packed
        for found in self.resumed.finish(Sources(self.paths)):
            yield 0, _rows(found.assembly.exchanges), None, b""


def _rows(exchanges) -> list[tuple[int, ...]]:
    sides = exchanges["request"], exchanges["response"]
    return sorted(
        zip(
            exchanges["exchange_id"].tolist(), exchanges["correlation_id"].tolist(),
            exchanges["status"].tolist(), exchanges["queued_ns"].tolist(),
            *(side[name].tolist() for side in sides
              for name in ("pos", "size", "time_ns", "end_time_ns", "packet", "is_whole")),
            strict=True,
        )
    )  # fmt: skip


@pytest.fixture
def one_packet(window_bytes: Callable[[int], None]) -> None:
    window_bytes(40)


@pytest.mark.usefixtures("one_packet")
@cases("kind", QUICK, heavy=[kind for kind in KINDS if kind not in QUICK])
def test_a_window_for_each_packet(kind: str, tmp_path: Path) -> None:
    """The exchanges are those of one run; a state has the open frame's records and no secret."""
    book, log = _conversation(kind, tmp_path)
    whole = book.run(log)
    expected = _rows(whole.exchanges)
    assert len(expected) == 8
    found: list[tuple[int, ...]] = []
    resumed_count = 0
    generations = set()
    for count, rows, state, packed in Run(
        write_packets(tmp_path / "talk.pcap", book.packets), log
    ).rows():
        found += rows
        if not packed:
            continue
        resumed_count += 1
        assert state is not None
        assert state.tls is not None
        generations |= {point.generation for point in state.tls.points}
        assert not any(secret in packed for secret in _secrets(log))
        # what the segments brought since the last exchange was complete
        since = whole.exchanges["response"]["end_time_ns"]
        end = max(
            (int(time) for time in since if time < book.packets[count - 1].time_ns), default=0
        )
        sent = [packet.payload for packet in book.packets[:count] if packet.time_ns > end]
        assert state.size <= sum(map(len, sent))
        assert len(packed) <= state.size + 3000 + 60 * len(sent)
    assert sorted(found) == expected
    assert resumed_count > 30
    assert (generations == {0}) == ("updates" not in kind)


@cases("kind", ["1.3 key updates", "1.2 CBC"], heavy=["1.3 traffic secrets", "1.2 mutual"])
def test_two_parts_make_the_tables_of_one_run(kind: str, tmp_path: Path, in_process) -> None:
    """An append after a cut in TLS gives the tables of one run over both parts."""
    book, log = _conversation(kind, tmp_path)
    capture = write_packets(tmp_path / "talk.pcap", book.packets)
    keylog = tmp_path / "talk.keylog"
    keylog.write_bytes(log)
    for place in (len(book.packets) // 3, len(book.packets) * 2 // 3 + 3):
        parts = rotated(capture, [place], tmp_path / "parts")
        out = tmp_path / "tables"
        kdissect.dissect(None, parts[0], out, overwrite=True, keep_state=True, keylog=keylog)
        _check_state(out, log)
        tables = kdissect.dissect(None, parts[1], out, append=True, keylog=keylog)
        assert tables.manifest["append"] == {"read_again": None}
        assert not counted(tables)
        check(tables, parts, keylog=keylog)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["tls12", "tls13"])
def test_cuts_of_captures_with_lost_packets(name: str, tmp_path: Path, in_process) -> None:
    """Record numbers are searched after each gap, in whichever part it is filled or given up."""
    whole = needed(SHARED / "tls" / f"{name}.pcap")
    shutil.copy(whole.with_suffix(".keylog"), tmp_path)
    lossy = lose_packets(whole, tmp_path / whole.name, 0.02)
    assert check_cuts(lossy, 5, tmp_path) == {None: 5}


def _check_state(out: Path, log: bytes) -> None:
    """No saved file has a secret of the key log, and the state stays small."""
    saved = saved_bytes(out)
    assert saved
    assert not any(secret in saved for secret in _secrets(log))
    assert len(saved) < 2 * RECORD_MAX + 20_005 + 10_000


def test_secrets_in_a_new_capture_make_it_read_all_again(tmp_path: Path, in_process) -> None:
    """An append decrypts the connections of other captures with secrets that a new one has."""
    book, log = _conversation("1.3", tmp_path)
    blocks, packets = Blocks(), book.packets
    captures = [write_packets(tmp_path / "0.pcap", packets[:1]), tmp_path / "1.pcapng"]
    data = [blocks.section(), blocks.interface(resolution=9), blocks.secrets(log)]
    data += [blocks.enhanced(packet.data, packet.time_ns) for packet in packets[1:20]]
    captures[1].write_bytes(b"".join(data))
    captures.append(write_packets(tmp_path / "2.pcap", packets[20:]))
    for capture in captures:
        tables = kdissect.dissect(None, capture, tmp_path / "tables", append=True)
    assert tables.exchanges.num_rows == 8
    check(tables, captures)


def test_a_missing_key_log_is_noted(tmp_path: Path, in_process) -> None:
    """An append without its key log counts the bytes, and notes the missing secrets."""
    book, log = _conversation("1.3", tmp_path)
    capture = write_packets(tmp_path / "talk.pcap", book.packets)
    keylog = tmp_path / "talk.keylog"
    keylog.write_bytes(log)
    part, *rest = rotated(capture, [len(book.packets) // 2, len(book.packets) // 2 + 20], tmp_path)
    out = tmp_path / "tables"
    kdissect.dissect(None, part, out, keep_state=True, keylog=keylog)
    keylog.unlink()
    tables = kdissect.dissect(None, rest[0], out, append=True)
    assert tables.manifest["append"] == {"read_again": None}
    (note,) = tables.notes
    assert "secrets that are gone" in note
    details = tables.anomalies.to_arrow()["detail"].to_pylist()
    assert sum("secrets that are gone" in detail for detail in details) == 1
    again = kdissect.dissect(None, rest[1], out, append=True)
    assert again.manifest["append"] == {"read_again": None}
    (row,) = again.connections.to_pylist()
    data = [
        sum(len(packet.payload) for packet in book.packets if packet.source[1] == port)
        for port in book.ports
    ]
    assert [row["request_byte_count"], row["response_byte_count"]] == data
    other = tmp_path / "moved.keylog"
    other.write_bytes(log)
    last = kdissect.dissect(None, rest[1], out, append=True, keylog=other)
    assert last.manifest["append"] == {"read_again": "there are new port hints or key logs"}
    check(last, [part, *rest], keylog=other)


@pytest.mark.parametrize("kind", ["1.3", "1.2"])
def test_connections_without_keys_are_counted(kind: str, tmp_path: Path, in_process) -> None:
    """A key log of others: each part counts the bytes, and says once that they are encrypted."""
    book, _ = _conversation(kind, tmp_path)
    (tmp_path / "other").mkdir()
    keylog = tmp_path / "talk.keylog"
    keylog.write_bytes(_conversation(kind, tmp_path / "other")[1])
    capture = write_packets(tmp_path / "talk.pcap", book.packets)
    parts = rotated(capture, [len(book.packets) // 3, len(book.packets) * 2 // 3], tmp_path)
    out = tmp_path / "tables"
    for part in parts:
        tables = kdissect.dissect(None, part, out, append=True, keylog=keylog)
        sizes = [file.stat().st_size for file in (out / "_state").rglob("*.parquet")]
        # and what a file needs to describe the columns of `connections`
        assert max(sizes) < TLS_HANDSHAKE_BYTES + 25_000
    assert not counted(tables)
    check(tables, parts, keylog=keylog)


@pytest.mark.usefixtures("one_packet")
@pytest.mark.parametrize("damage", ["bytes", "updates"])
def test_a_stream_that_cannot_be_decrypted_any_more_is_given_up(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its open request is complete as it is, and it is carried no longer."""
    if damage == "updates":
        monkeypatch.setattr("kdissect.tls.plaintext.GENERATION_MAX", 1)
    book, log = _conversation("1.3 key updates" if damage == "updates" else "1.3", tmp_path)
    book = book >> b"\x17\x03\x03\x40\0" + bytes(16)
    for _ in range(20):
        book = book >> bytes(16368) + b"\x17\x03\x03\x40\0" + bytes(16)
    found, sizes, protocols = [], [], []
    for _, rows, state, _ in Run(write_packets(tmp_path / "talk.pcap", book.packets), log).rows():
        found += rows
        if state is not None:
            sizes.append(state.size)
            protocols.append(state.protocol)
    assert protocols[-1] is Protocol.OTHER
    assert sizes[-1] == 0
    assert max(sizes) < LOOKED_AT_MAX + 2 * RECORD_MAX
    assert len(found) == (8 if damage == "bytes" else len(set(found)))


def test_states_of_other_bytes_are_refused() -> None:
    """Whatever a file says: a state within its limits, or a ValueError."""
    session = Session(0, 0x304, 0x1302, b"c" * 32, b"s" * 32, b"i" * 32)
    tls = TlsState(session, (RecordPoint(7, 2, 5), RecordPoint(0)))
    state = replace(new_connection(bytes(ENDPOINTS.itemsize)), tls=tls)
    table = to_table([state])
    (again,) = from_table(table)
    assert again.tls == tls
    saved = json.loads(json.dumps(tls.to_json()))
    assert TlsState.from_json(saved) == tls
    bad = [None, [], {}, {"session": {}, "points": []}, saved | {"points": saved["points"][:1]}]
    for name, value in [("client_random", "00"), ("client_random", 5), ("suite", -1),
                        ("version", "x"), ("client_side", 2), ("session_id", "00" * 33),
                        ("more", 1)]:  # fmt: skip
        bad.append(saved | {"session": saved["session"] | {name: value}})
    for name, value in [("number", -1), ("number", 1 << 63), ("generation", GENERATION_MAX + 1),
                        ("generation", None), ("skip", 1 << 15), ("skip", -1)]:  # fmt: skip
        bad.append(saved | {"points": [saved["points"][0] | {name: value}, saved["points"][1]]})
    for each in bad:
        with pytest.raises(ValueError, match="TLS connection"):
            TlsState.from_json(each)
    text = table["tls"][0].as_py()
    for old, new in (('"number": 7', '"number":-7'), ('"suite"', '"Suite"'), ("[{", "[[")):
        other = pa.array([text.replace(old, new)])
        with pytest.raises(ValueError, match=r"."):
            from_table(table.set_column(4, "tls", other))
    with pytest.raises(ValueError, match="another version"):
        from_table(table.drop_columns(["rtt"]))
