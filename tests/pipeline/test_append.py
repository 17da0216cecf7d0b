"""--append: an exchange is a row of the run whose packets complete it; differences are counted."""

import json
import os
import shutil
from pathlib import Path
from uuid import UUID

import pytest

import kdissect
from kdissect import accounts
from kdissect.errors import OutputError
from kdissect.pipeline import local, spark, task_table
from kdissect.pipeline.append import ReadAgainError, append_plan, extended
from kdissect.pipeline.options import Options
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.table_set import MANIFEST, read_manifest
from tests.builders.captures import Packet, split_capture, write_packets
from tests.builders.frames import request, response
from tests.builders.messages import batch, fetch, metadata_record, write_capture
from tests.builders.tables import all_rows, set_files
from tests.builders.talks import Talk
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.objects import files_in
from tests.pipeline.appending import (
    appended,
    check,
    check_cuts,
    counted,
    plain,
    rotated,
    saved_bytes,
)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "tables"


# -- by state -------------------------------------------------------------------------------


def test_an_open_request_is_a_row_of_the_run_with_its_response(tmp_path, in_process):
    """Open requests of a file are told, and are no rows until the next file answers them."""
    talk, out = Talk(), tmp_path / "tables"
    for number in range(3):
        talk.exchange(number)
    talk.ask(request(3))
    captures = [write_packets(tmp_path / "0.pcap", talk.packets)]
    first = appended(out, captures[0])
    assert first.notes == [
        "1 requests or responses are not complete: the next --append continues them"
    ]
    assert first.exchanges.num_rows == 3
    assert accounts.check(first)["faults"] == []
    talk.packets.clear()
    talk.answer(response(3))
    captures.append(write_packets(tmp_path / "1.pcap", talk.packets))
    both = appended(out, captures[1])
    assert both.notes == []
    assert both.exchanges.num_rows == 4
    check(both, captures)
    assert [item["path"] for item in both.manifest["inputs"]] == list(map(str, captures))
    again = appended(out, captures, read_again=True)
    assert again.manifest["state"] == {"missing": "it was written without --keep-state"}
    assert all_rows(again) == all_rows(kdissect.read(captures))


@pytest.mark.parametrize("distance", [0, 1 << 20])
def test_connections_of_the_same_endpoints(tmp_path, in_process, distance):
    """Each is closed an hour before the next one. A conversation that is played again has the same
    sequence numbers. The ids are those of one run."""
    out, captures = tmp_path / "tables", []
    for hour in range(3):
        talk = Talk(start=hour * 3600 * 1_000_000 + 1000, opened=False)
        talk.next = [first + hour * distance for first in talk.next]
        talk.open()
        for number in range(3):
            talk.exchange(number)
        talk.close()
        other = Talk(41000 + hour, start=hour * 3600 * 1_000_000 + 1800 * 1_000_000)
        other.exchange(0)
        captures.append(write_packets(tmp_path / f"{hour}.pcap", talk.packets + other.packets))
        tables = appended(out, captures[-1])
    both = tables, kdissect.read(captures)
    for name, column, count in (
        ("exchanges", "exchange_id", 12),
        ("connections", "connection_id", 6),
    ):
        found = [{*each[name].to_arrow()[column].to_pylist()} for each in both]
        assert len(found[0]) == count
        assert found[0] == found[1]


@pytest.mark.heavy
@pytest.mark.spark
def test_many_tasks_append_what_one_does(spark, tmp_path, out, monkeypatch):
    """Appends on Spark with many splits and slots give the set of one run."""
    monkeypatch.setattr(task_table, "TABLE_BYTES", 0)
    captures = rotated(CAPTURES / "java_2_0_1.pcap", 3, tmp_path / "parts")
    for capture in captures:
        tables = kdissect.dissect(spark, capture, out, append=True, split_bytes=20_000)
    assert tables.manifest["append"] == {"read_again": None}
    check(tables, captures)


@pytest.mark.spark
def test_a_small_append_to_a_large_set_has_tasks_for_its_events(spark, tmp_path, out, monkeypatch):
    """No task reads the events of all captures so far, even if one would do for the new bytes."""
    captures = rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts")
    kdissect.dissect(spark, captures[0], out, keep_state=True)
    monkeypatch.setattr("kdissect.pipeline.plan.EVENT_KEY_BYTES", 10_000)
    monkeypatch.setattr("kdissect.pipeline.spark._whole", None)
    check(kdissect.dissect(spark, captures[1], out, append=True), captures)


@cases("name", ["java_2_0_1"], heavy=["librdkafka"])
def test_captures_that_are_gone_are_not_missed(name, tmp_path, out, in_process):
    """Appends need no earlier capture, and leave no file that the manifest lacks."""
    captures = rotated(CAPTURES / f"{name}.pcap", 3, tmp_path / "parts")
    for capture in captures:
        tables = appended(out, capture)
        assert tables.manifest.get("append", {}).get("read_again") is None
        os.rename(capture, f"{capture}.gone")
    for capture in captures:
        os.rename(f"{capture}.gone", capture)
    check(kdissect.open(out), captures)
    manifest = read_manifest(str(out))
    assert manifest["state"]["tables"]
    assert files_in(out) == set_files(str(out))
    assert manifest["totals"]["bytes"] == sum(os.path.getsize(path) for path in captures)


def _shared_captures() -> list[Path]:
    """Those of up to 9 MB, without secrets of TLS, which no state may hold."""
    paths = [path for path in sorted(SHARED.rglob("*.pcap*")) if path.stat().st_size < 9 << 20]
    return [path for path in paths if path.name != "tls_dsb.pcapng"]


@cases(
    ("path", "cuts"),
    [(CAPTURES / "java_0_10_2_2.pcap", 2), (CAPTURES / "tls13.pcap.gz", 1)],
    heavy=[(CAPTURES / "sarama.pcap.gz", 1), *((path, 20) for path in _shared_captures())],
)
def test_two_parts_have_the_exchanges_of_one_run(path, cuts, tmp_path, in_process):
    """A capture in two parts, cut at some places, the second appended to the first."""
    assert check_cuts(path, cuts, tmp_path) == {None: cuts}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["cluster/cluster", "java_latest/java_latest"])
def test_connections_that_cross_many_files(name, tmp_path, in_process):
    """Connections that cross nine files."""
    captures = rotated(needed(SHARED / f"{name}.pcap"), 9, tmp_path / "parts")
    for capture in captures:
        tables = appended(tmp_path / "tables", capture)
    check(tables, captures)


def test_parts_without_packets(tmp_path, out, in_process):
    """The set of an empty capture, of another, and of an empty one again."""
    talk = Talk()
    talk.exchange(1)
    captures = [
        write_packets(tmp_path / f"{number}.pcap", packets)
        for number, packets in enumerate(([], talk.packets, []))
    ]
    kdissect.dissect(None, captures[0], out, keep_state=True)
    for count in (2, 3):
        tables = appended(out, captures[count - 1])
        assert tables.manifest["append"] == {"read_again": None}
        assert tables.exchanges.num_rows == 1
        check(tables, captures[:count])


# -- exceptions -----------------------------------------------------------------------------


def _append_made(tmp_path: Path, *files: list[Packet]) -> kdissect.Tables:
    for number, packets in enumerate(files):
        capture = write_packets(tmp_path / f"{number}.pcap", packets)
        tables = kdissect.dissect(None, capture, tmp_path / "tables", append=True)
    assert tables.manifest.get("append", {}).get("read_again") is None
    return tables


def test_a_packet_after_its_connection_was_over_counts_in_its_row(tmp_path, in_process):
    """The row of `connections` is that of one run."""
    talk, other = Talk(), Talk(40001, 3_000_000)
    talk.exchange(1)
    talk.close()
    other.exchange(1)
    first = [*talk.packets, *other.packets]
    talk.time = other.time + 1000
    talk.packets.clear()
    talk.acknowledge(0)
    tables = _append_made(tmp_path, first, talk.packets)
    assert not counted(tables)
    assert tables.exchanges.num_rows == 2
    check(tables, [str(tmp_path / "0.pcap"), str(tmp_path / "1.pcap")])


def test_bytes_of_a_gap_that_was_given_up_are_counted(tmp_path, in_process):
    """A retransmission after the gap was given up is a late packet."""
    talk = Talk()
    for number in range(4):
        talk.exchange(number, keep=number != 1)
        talk.time += 4_000_000
    first, talk.packets = talk.packets, []
    talk.next[1] -= 3 * len(response(1))
    talk.answer(response(1))
    tables = _append_made(tmp_path, first, talk.packets)
    assert counted(tables) == {"late_packets": 1}
    assert tables.exchanges.to_arrow()["status"].to_pylist().count("paired") == 3


def test_a_connection_that_was_given_up_is_counted(tmp_path, in_process):
    """A connection without Kafka beyond its limit is a carry_limit; its bytes are counted on."""
    talk = Talk()
    talk.ask(b"\xff" * 300_000)
    first, talk.packets = talk.packets, []
    talk.ask(b"\xff" * 100)
    tables = _append_made(tmp_path, first, talk.packets)
    assert counted(tables) == {"carry_limit": 1}
    (row,) = tables.connections.to_pylist()
    assert row["request_byte_count"] + row["response_byte_count"] == 300_100


def test_a_bucket_that_is_too_large_ends_its_connections(tmp_path, in_process, monkeypatch):
    """Its open requests are rows, and the connections that may go on are counted."""
    monkeypatch.setattr("kdissect.pipeline.assemble.SEGMENTS_MAX", 2)
    talk = Talk()
    talk.exchange(1)
    talk.ask(request(2))
    tables = _append_made(tmp_path, talk.packets)
    assert tables.exchanges.num_rows == 2
    assert counted(tables) == {"carry_limit": 1}


def test_no_state_has_records_of_the_metadata_log(tmp_path, out, in_process):
    """A response that a file begins and the next one ends is not kept if it may hold SCRAM keys."""
    value = metadata_record("UserScramCredentialRecord", name="eve", stored_key=b"hunter2")
    pair = fetch(1, UUID(int=1), [batch([(None, value), (None, bytes(100_000))])], version=17)
    path = write_capture(tmp_path / "made.pcap", [pair])
    count = len(split_capture(path.read_bytes())[1])
    parts = rotated(path, [count - 1], tmp_path / "parts")
    kdissect.dissect(None, parts[0], out, keep_state=True)
    assert b"hunter2" not in saved_bytes(out)
    kdissect.dissect(None, parts[0], out, overwrite=True, keep_state=True, reveal_secrets=True)
    assert b"hunter2" in saved_bytes(out)


def test_secrets_that_come_late_are_told(tmp_path, out, in_process):
    """An append keeps connections encrypted whose secrets came after their first bytes."""
    captures = rotated(plain(CAPTURES / "tls13.pcap.gz", tmp_path), 2, tmp_path / "parts")
    keylog = tmp_path / "keys.log"
    keylog.write_text("# no secrets yet\n")
    count = len([row for row in appended(out, captures[0], keylog=keylog).connections.to_pylist()
                 if row["protocol"] == "tls"])  # fmt: skip
    shutil.copyfile(CAPTURES / "tls13.keylog", keylog)
    told = f"{count} connections were not decrypted, and a key log has changed since"
    assert count > 0
    assert appended(out, captures[1], keylog=keylog).notes[0] == f"{told}: --read-again uses it"
    again = appended(out, captures[1], keylog=keylog, read_again=True)
    assert all_rows(again) == all_rows(kdissect.read(captures, keylog=keylog))


def test_names_that_earlier_rows_lack_are_counted(tmp_path, out, in_process):
    """Topic names that come late are counted; --read-again gives the rows of one run."""
    captures = rotated(plain(CAPTURES / "sarama.pcap.gz", tmp_path), 5, tmp_path / "parts")
    notes = [note for one in captures for note in appended(out, one).notes]
    notes = [note for note in notes if "that earlier rows lack" in note]
    tables = kdissect.open(out)
    assert counted(tables)["late_names"] == len(notes) > 0
    check(tables, captures)
    again = appended(out, captures[-1], read_again=True)
    assert again.manifest["append"] == {"read_again": "--read-again"}
    assert all_rows(again) == all_rows(kdissect.read(captures))


# -- read again -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_sets(tmp_path_factory):
    """A folder for both halves of a capture and the set of the first one, made by `halves`."""
    return tmp_path_factory.mktemp("halves")


@pytest.fixture
def halves(half_sets, tmp_path, in_process):
    """Both halves of a capture, whole, and a new copy of the set of the first one, with state."""
    captures = rotated(CAPTURES / "java_2_0_1.pcap", 2, half_sets / "parts")
    if not (half_sets / "tables").exists():
        kdissect.dissect(None, captures[0], half_sets / "tables", keep_state=True)
    shutil.copytree(half_sets / "tables", tmp_path / "tables")
    return captures, tmp_path / "tables"


def test_a_capture_from_the_middle_is_read_with_all(tmp_path, out, in_process):
    """A capture from the middle makes the run read all captures again."""
    captures = rotated(CAPTURES / "librdkafka.pcap", 3, tmp_path / "parts")
    kdissect.dissect(None, [captures[0], captures[2]], out, keep_state=True)
    tables = appended(out, captures[1])
    reason = "the new captures begin before the end of those in the set"
    assert tables.manifest["append"] == {"read_again": reason}
    assert tables.notes[0] == f"the captures of {out} were read again: {reason}"
    check(tables, captures)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("ports", "new port hints"),
        ("state", "is gone"),
        ("version", "another version"),
        ("old", "without --keep-state"),
        ("option", "--read-again"),
    ],
)
def test_why_captures_are_read_again(change, reason, halves):
    """Each reason has its words."""
    captures, out = halves
    manifest = json.loads((out / MANIFEST).read_text())
    ports, is_wanted = ((9092,) if change == "ports" else ()), change == "option"
    if change == "state":
        shutil.rmtree(out / "_state")
    if change == "version":
        manifest["program_version"] = "0.0"
    if change == "old":
        del manifest["state"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ReadAgainError, match=reason):
        append_plan(str(out), [captures[1]], Options(ports=ports), is_wanted)


def test_a_state_is_saved_on_request_only(out, in_process):
    """Without --keep-state there is no folder _state."""
    first = kdissect.dissect(None, CAPTURES / "java_2_0_1.pcap", out)
    assert first.manifest["state"] == {"missing": "it was written without --keep-state"}
    assert not (out / "_state").exists()


def test_sets_that_keep_no_state_are_read_again(tmp_path, out, in_process):
    """A set whose options exclude a state is appended by reading again."""
    captures = rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts")
    first = kdissect.dissect(None, captures[0], out, payload="keys", keep_state=True)
    assert "as captured" in first.manifest["state"]["missing"]
    check(appended(out, captures[1], payload="keys"), captures, payload="keys")


def test_a_capture_that_is_gone_and_needed_is_named_with_the_reason(halves):
    """The error says which capture and why it is needed."""
    captures, out = halves
    shutil.rmtree(out / "_state")
    os.unlink(captures[0])
    with pytest.raises(kdissect.CaptureError, match=r"it is gone; it must be read again: .*_state"):
        appended(out, captures[1])


# -- care -----------------------------------------------------------------------------------


def test_a_capture_counts_once(halves):
    """A capture of the set is left out with a note; a changed one is refused."""
    captures, out = halves
    before = (out / MANIFEST).read_bytes()
    again = appended(out, captures[0])
    assert again.notes == [f"{captures[0]}: is in {out} already; left out"]
    assert (out / MANIFEST).read_bytes() == before
    both = appended(out, captures)
    assert again.notes[0] in both.notes
    check(both, captures)
    Path(captures[1]).write_bytes(Path(captures[1]).read_bytes()[:-9])
    with pytest.raises(kdissect.CaptureError, match=r"it must be read again: .*not what it was"):
        appended(out, captures[1])


def test_a_capture_counts_once_by_any_of_its_names(halves, tmp_path, monkeypatch):
    """A relative path, an absolute one and a link name the same file."""
    captures, _ = halves
    out = tmp_path / "relative"
    monkeypatch.chdir(Path(captures[0]).parent)
    kdissect.dissect(None, "part000.pcap", out, keep_state=True)
    before = (out / MANIFEST).read_bytes()
    link = tmp_path / "link.pcap"
    link.symlink_to(captures[0])
    for name in ("./part000.pcap", captures[0], str(link)):
        assert appended(out, name).notes == [f"{name}: is in {out} already; left out"]
    monkeypatch.chdir(tmp_path)
    for name in (captures[0], "link.pcap"):
        assert appended(out, name).notes == [f"{name}: is in {out} already; left out"]
    assert (out / MANIFEST).read_bytes() == before


def test_files_that_are_no_captures_are_left_out_until_they_are(tmp_path, in_process):
    """A file that `tcpdump` has just opened does not end the chain of appends, nor does a note."""
    out, folder, captures = tmp_path / "tables", tmp_path / "folder", []
    folder.mkdir()
    for number in range(3):
        talk = Talk(40000 + number, number * 3_600_000_000)
        talk.exchange(1)
        talk.close()
        captures.append(str(write_packets(folder / f"dump-{number}.pcap", talk.packets)))
        newest = folder / f"dump-{number + 1}.pcap"
        newest.write_bytes(b"")
        tables = appended(out, folder)
        assert tables.exchanges.num_rows == number + 1
        assert tables.notes[-1] == f"{newest}: the file is empty; left out"
        assert tables.manifest.get("append", {"read_again": None}) == {"read_again": None}
    (folder / "notes.txt").write_text("no capture")
    before = (out / MANIFEST).read_bytes()
    tables = appended(out, folder)
    assert f"{folder / 'notes.txt'}: not a pcap or pcapng file; left out" in tables.notes
    assert (out / MANIFEST).read_bytes() == before
    assert sorted(row["path"] for row in tables.captures.to_pylist()) == captures
    check(tables, captures)


def test_a_capture_that_was_listed_as_empty_is_new(tmp_path, out, in_process):
    """Sets of earlier releases list such files, which an append neither reads nor compares."""
    talk = Talk()
    talk.exchange(1)
    first = write_packets(tmp_path / "0.pcap", talk.packets)
    appended(out, first)
    manifest = json.loads((out / MANIFEST).read_text())
    (item,) = manifest["inputs"]
    listed = item | {"path": str(tmp_path / "1.pcap"), "size": 0, "is_capture": False}
    manifest["inputs"].append(listed)
    (out / MANIFEST).write_text(json.dumps(manifest))
    talk.packets.clear()
    talk.exchange(2)
    second = write_packets(tmp_path / "1.pcap", talk.packets)
    os.unlink(first)
    assert appended(out, second).exchanges.num_rows == 2


def test_a_capture_that_grew_while_it_was_read_is_read_again(tmp_path, in_process, monkeypatch):
    """A set lacks what a capture got after the run had listed it; the next append reads it."""
    part, _ = rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts")
    out, scan = tmp_path / "tables", local.scan

    def growing(*args):
        shutil.copy(CAPTURES / "java_2_0_1.pcap", part)
        return scan(*args)

    with monkeypatch.context() as patch:
        patch.setattr(local, "scan", growing)
        count = appended(out, part).exchanges.num_rows
    tables = appended(out, part)
    assert tables.manifest["append"] == {"read_again": f"{part} is not what it was"}
    assert count < tables.exchanges.num_rows
    check(tables, [part])


def test_tasks_walk_over_new_captures(tmp_path, in_process, monkeypatch):
    """As in a run over all captures, the driver does not unpack the captures of an append."""
    captures = rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts", ".gz")
    walked = []

    def in_tasks(_):
        def run(call, items):
            walked.extend(item.path for group in items for item in group)
            return [call(item) for item in items]

        return run

    monkeypatch.setattr(spark, "in_tasks", in_tasks)
    monkeypatch.setattr(spark, "run", lambda _, *plan: local.staged_run(*plan))
    for capture in captures:
        kdissect.dissect("a session", capture, tmp_path / "tables", append=True)
    assert walked == captures


def test_a_capture_that_was_replaced_is_refused(halves):
    """Its rows would be lost if the captures were read again."""
    captures, out = halves
    before = (out / MANIFEST).read_bytes()
    shutil.copy(CAPTURES / "librdkafka.pcap", captures[0])
    with pytest.raises(kdissect.CaptureError, match=r"000\.pcap: .* made from other bytes"):
        appended(out, captures[0])
    assert (out / MANIFEST).read_bytes() == before


def test_a_copy_of_a_set_has_no_state(halves):
    """A set with state can be written elsewhere; appends to the copy read the captures again."""
    captures, out = halves
    copy = kdissect.open(out).write(out.parent / "copy")
    assert all_rows(copy) == all_rows(kdissect.open(out))
    tables = appended(out.parent / "copy", captures[1])
    assert tables.manifest["append"] == {"read_again": "the set is a copy"}
    check(tables, captures)


def test_an_append_that_fails_leaves_the_set(halves, monkeypatch):
    """An interrupt before the manifest is replaced leaves the old rows."""
    captures, out = halves
    before = all_rows(kdissect.open(out))
    real = SetFolder.publish

    def failing(place, staged):
        if staged.endswith(MANIFEST):
            raise KeyboardInterrupt
        return real(place, staged)

    with monkeypatch.context() as patch:
        patch.setattr(SetFolder, "publish", failing)
        with pytest.raises(KeyboardInterrupt):
            appended(out, captures[1])
    assert all_rows(kdissect.open(out)) == before
    tables = appended(out, captures[1])
    assert tables.manifest["append"] == {"read_again": None}
    check(tables, captures)


def _set(tmp_path, **options):
    capture = tmp_path / "a.pcap"
    shutil.copy(CAPTURES / "java_2_0_1.pcap", capture)
    out = tmp_path / "tables"
    kdissect.read(capture, **options).write(out)
    return str(capture), str(out)


def test_captures_and_hints_of_both_are_read(tmp_path):
    """Captures and ports of the set come before those of the call."""
    capture, out = _set(tmp_path, ports=[9092])
    paths, options = extended(out, ["b.pcap", capture], Options(ports=(9093,)))
    assert paths == [capture, "b.pcap"]
    assert options.ports == (9092, 9093)
    paths, options = extended(str(tmp_path / "none"), ["b.pcap"], Options())
    assert (paths, options) == (["b.pcap"], Options())


def test_a_set_made_otherwise_is_not_mixed(tmp_path):
    """Other options than those of the set raise OutputError."""
    _, out = _set(tmp_path, payload="keys")
    with pytest.raises(OutputError, match="made with payload = 'keys', not 'full'"):
        extended(out, ["b.pcap"], Options())


def test_a_capture_that_is_gone_is_said(tmp_path):
    """A cut or missing capture raises CaptureError with its state now."""
    capture, out = _set(tmp_path)
    with open(capture, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(kdissect.CaptureError, match="it has 1000 now"):
        extended(out, ["b.pcap"], Options())
    (tmp_path / "a.pcap").unlink()
    with pytest.raises(kdissect.CaptureError, match="it is gone"):
        extended(out, ["b.pcap"], Options())
