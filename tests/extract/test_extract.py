"""`extract` writes exactly the packets of the selected exchanges."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kdissect
from kdissect.capture.inputs import find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.capture.splits import pick
from kdissect.errors import CaptureError
from kdissect.extract import extract
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import planned
from kdissect.pipeline.selection import ConnectionName, Selection
from tests.builders.messages import request_frame, response_frame, write_capture
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.oracles.packets import read_capture
from tests.processes import run

CAPTURE = CAPTURES / "librdkafka.pcap"
NOTHING_LOST = ("api_name", "api_version", "correlation_id", "client_id", "request_size",
                "response_size", "request_time_ns", "response_time_ns", "latency_ms", "topics",
                "error_codes", "decode_status")  # fmt: skip


def _run(tmp_path: Path, choice: Selection, *captures: Path, **options: object):
    out = tmp_path / "out.pcapng"
    done = extract(captures or (CAPTURE,), out, choice, Options(payload="none", **options))
    return done, out


def _rows(table: pa.Table, columns=NOTHING_LOST) -> list[tuple]:
    rows = table.select(list(columns)).to_pylist()
    return sorted(tuple(str(value) for value in row.values()) for row in rows)


def _packets(path: Path) -> list[tuple[int, bytes, int]]:
    data = path.read_bytes()
    return [
        (packet.time_ns, data[packet.data_pos : packet.data_pos + packet.captured], packet.length)
        for packet in read_capture(data).packets
    ]


def test_everything_is_every_packet(tmp_path):
    """Without filters each packet is copied."""
    done, out = _run(tmp_path, Selection())
    assert _packets(out) == _packets(CAPTURE)
    assert (done.packets, done.exchanges, done.connections) == (1265, 319, 38)


def test_an_exchange_alone_decodes_as_it_did(tmp_path, librdkafka):
    """The packets of one exchange give its row again, with fewer packets."""
    exchanges = librdkafka.exchanges.to_arrow()
    largest = exchanges.take(
        [int(pc.index(exchanges["response_size"], pc.max(exchanges["response_size"])).as_py())]
    )
    done, out = _run(tmp_path, Selection(exchanges=(largest["exchange_id"][0].as_py(),)))
    found = kdissect.read(out, ports=[9092]).exchanges.to_arrow()
    # a topic's id was told elsewhere in the capture
    columns = [name for name in NOTHING_LOST if name != "topics"]
    assert _rows(found, columns) == _rows(largest, columns)
    original = set(_packets(CAPTURE))
    assert 0 < done.packets == len(_packets(out))
    assert set(_packets(out)) < original


@pytest.mark.parametrize(
    ("choice", "column", "value"),
    [
        (Selection(clients=("sample-producer",)), "client_id", "sample-producer"),
        (Selection(groups=("rd-classic",)), "group_id", "rd-classic"),
    ],
)
def test_filters_take_the_exchanges_that_hold(tmp_path, librdkafka, choice, column, value):
    """The packets of the selected rows, and no others' exchanges."""
    exchanges = librdkafka.exchanges.to_arrow()
    expected = exchanges.filter(pc.fill_null(pc.equal(exchanges[column], value), False))
    done, out = _run(tmp_path, choice)
    assert done.exchanges == len(expected)
    original, written = _packets(CAPTURE), set(_packets(out))
    for side in ("request", "response"):
        for number in expected[f"{side}_packet"].drop_null().to_pylist():
            assert original[number - 1] in written
    assert (done.packets == 0) == (len(expected) == 0)


def test_packets_left_out_are_told_as_a_choice(tmp_path):
    """The gaps of an extracted file are no proof that a capture lost packets."""
    _, out = _run(tmp_path, Selection(topics=("rd-events",), groups=("rd-classic",)))
    (loss,) = kdissect.read(out).incidents().to_pylist()
    assert loss["kind"] == "capture_loss"
    assert "If no filter and no kdissect extract left packets out, check" in loss["text"]


def test_patterns_of_names(tmp_path, librdkafka):
    """* and ? fit anything, in client ids, topics and groups."""
    exchanges = librdkafka.exchanges.to_arrow(
        ["client_id", "topics", "group_id", "transactional_id"]
    )
    for choice, fits in (
        (Selection(clients=("rd-c?",)), lambda row: (row["client_id"] or "").startswith("rd-c")),
        (
            Selection(topics=("rd-*",)),
            lambda row: any(t.startswith("rd-") for t in row["topics"] or ()),
        ),
        (Selection(groups=("rd-classi?",)), lambda row: row["group_id"] == "rd-classic"),
    ):
        done, _ = _run(tmp_path, choice)
        (tmp_path / "out.pcapng").unlink()
        assert done.exchanges == sum(map(fits, exchanges.to_pylist())) > 0


def test_a_connection_comes_with_its_handshake(tmp_path, librdkafka):
    """All packets of one connection: its row is the same."""
    row = librdkafka.connections.to_arrow().filter(pc.field("is_kafka")).slice(3, 1).to_pylist()[0]
    place = f"{row['client_ip']}:{row['client_port']}"
    _, out = _run(tmp_path, Selection(connections=(ConnectionName.of(place),)))
    found = kdissect.read(out).connections.to_pylist()
    assert len(found) == 1
    same = [name for name in row if name not in ("connection_id",)]
    assert {name: found[0][name] for name in same} == {name: row[name] for name in same}


def test_several_captures_keep_their_order(tmp_path):
    """Packets of rotated files follow each other in one file."""
    captures = sorted(needed(SHARED / "shapes").glob("rotated_*.pcap"))
    _, out = _run(tmp_path, Selection(), *captures)
    assert _packets(out) == [packet for path in captures for packet in _packets(path)]


@pytest.mark.parametrize("name", ["shapes/any_sll2.pcap",
                                  "shapes/reordered.pcap", "shapes/seqwrap.pcap",
                                  "shapes/vlan_vxlan.pcap"])  # fmt: skip
def test_all_frames_asked_for_one_by_one_are_found_again(tmp_path, name):
    """Each exchange is in the extract of all exchange ids."""
    path = needed(SHARED / name)
    tables = kdissect.read(path, payload="none")
    exchanges = tables.exchanges.to_arrow()
    _, out = _run(tmp_path, Selection(exchanges=tuple(exchanges["exchange_id"].to_pylist())), path)
    again = kdissect.read(out, ports=[9092, 9093]).exchanges.to_arrow()
    names = ("api_name", "correlation_id", "request_size", "response_size", "decode_status")
    lost = set(_rows(exchanges, names)) - set(_rows(again, names))
    assert not lost, lost


def test_a_tls_exchange_brings_its_connection_and_the_secrets(tmp_path):
    """The extract decrypts on its own."""
    path, keys = needed(SHARED / "tls" / "tls13.pcap"), SHARED / "tls" / "tls13.keylog"
    tables = kdissect.read(path, keylog=keys)
    tls = tables.connections.to_arrow().filter(pc.field("is_tls") & pc.field("is_kafka"))
    exchanges = tables.exchanges.to_arrow().filter(
        pc.field("connection_id") == tls["connection_id"][0].as_py()
    )
    done, out = _run(
        tmp_path, Selection(exchanges=(exchanges["exchange_id"][0].as_py(),)), path,
        keylog=(str(keys),),
    )  # fmt: skip
    assert 0 < done.secrets_bytes < keys.stat().st_size  # without those of other connections
    found = kdissect.read(out).exchanges.to_arrow()
    assert _rows(found) == _rows(exchanges)


def test_plaintext_comes_without_secrets(tmp_path):
    """Of the connections of a key log, those that are not taken keep theirs."""
    path, keys = CAPTURES / "tls13.pcap.gz", CAPTURES / "tls13.keylog"
    done, out = _run(tmp_path, Selection(where="false"), path, keylog=(str(keys),))
    assert done.secrets_bytes == done.packets == 0
    assert b"TRAFFIC_SECRET" not in out.read_bytes()


def test_a_frame_that_is_its_size_alone(tmp_path):
    """The answer to a SASL token may be empty: its packet comes, and no other of the connection."""
    frames = [
        request_frame(17, 0, 1, mechanism="PLAIN"), response_frame(17, 0, 1, mechanisms=["PLAIN"]),
        b"\0user\0password", b"", request_frame(3, 1, 2), response_frame(3, 1, 2),
    ]  # fmt: skip
    path = write_capture(tmp_path / "made.pcap", zip(frames[::2], frames[1::2], strict=True))
    rows = kdissect.read(path).exchanges.to_pylist()
    (token,) = (row for row in rows if row["response_size"] == 0)
    done, out = _run(tmp_path, Selection(exchanges=(token["exchange_id"],)), path)
    assert done.packets == 2
    both = [token["request_packet"], token["response_packet"]]
    assert _packets(out) == [_packets(path)[number - 1] for number in both]


def test_each_named_connection_has_to_be_there(tmp_path, librdkafka):
    """One that is not is an error, also beside another that is."""
    names = (librdkafka.connections.to_arrow()["connection_id"][0].as_py(), 5)
    choice = Selection(connections=tuple(ConnectionName.of(str(name)) for name in names))
    with pytest.raises(CaptureError, match="no connection 5"):
        _run(tmp_path, choice)


def test_comments_name_exchanges_for_other_programs(tmp_path):
    """tshark and capinfos read the file; each request has a comment."""
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    done, out = _run(tmp_path, Selection(groups=("rd-classic",)))
    comments = ("-T", "fields", "-e", "frame.comment")
    shown = run("tshark", "-r", out, *comments, check=True).stdout
    assert len(shown.splitlines()) >= done.packets
    assert shown.count(" request ") == done.exchanges
    assert "JoinGroup v" in shown
    assert str(done.packets) in run("capinfos", "-c", "-M", out, check=True).stdout


def test_a_filter_without_a_match_is_a_warning(tmp_path, request):
    """The file has no packets; the next run does not replace it."""
    command = ["extract", str(CAPTURE), "--topic", "nowhere", "--out", str(tmp_path / "x.pcapng")]
    kdissect_run = request.getfixturevalue("kdissect")
    empty = kdissect_run(*command, "--json")
    assert empty.returncode == 0
    assert "nothing in the captures matches" in empty.stderr
    assert json.loads(empty.stdout)["packets"] == 0
    again = kdissect_run(*command)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize("name", ["pcapng_two_interfaces.pcapng", "be_ns.pcap"])
def test_packets_are_picked_where_the_oracle_reads_them(name):
    """Position, length, time and link type equal the oracle's."""
    path = needed(SHARED / "shapes" / name)
    data = path.read_bytes()
    expected = {
        packet.number: (packet.data_pos, packet.captured, packet.length, packet.time_ns,
                        packet.link_type)
        for packet in read_capture(data).packets
    }  # fmt: skip
    wanted = np.arange(1, len(expected) + 1, 7)
    with planned(find_captures([path]), Options(split_bytes=20_000)) as plan:
        sources = Sources([str(path)])
        found = {}
        for split in plan.splits:
            packets, link_types = pick(split, sources, wanted)
            columns = ["data_pos", "captured", "length", "time_ns"]
            rows = packets[columns].tolist()
            for number, row, link_type in zip(packets["number"], rows, link_types, strict=True):
                found[number] = (*row, link_type)
    assert found == {number: expected[number] for number in wanted.tolist()}
