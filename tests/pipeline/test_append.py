"""--append: the table set of all captures, whenever each of them came."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest

import kdissect
from kdissect.errors import OutputError
from kdissect.pipeline import kept, plan
from kdissect.pipeline.append import extended
from kdissect.pipeline.kept import read_state
from kdissect.pipeline.options import Options
from kdissect.pipeline.table_set import MANIFEST
from tests.conftest import CAPTURES, ROOT

SHARED = ROOT.parent / "shared" / "captures"
ROTATED = sorted((SHARED / "shapes").glob("rotated_*.pcap"))
# So that connections are cut, and forgotten, in captures of a few seconds too.
SMALL = {"keep_ns": 10_000_000, "linger_ns": 20_000_000, "cut_bytes": 0, "looked_at": 512}


def _rows(tables: kdissect.Tables) -> dict[str, Counter]:
    return {
        name: Counter(str(row) for row in tables[name].to_arrow().to_pylist())
        for name in tables.names
    }


def _check(tables: kdissect.Tables, captures, **options) -> None:
    found, expected = _rows(tables), _rows(kdissect.read(captures, **options))
    assert found.keys() == expected.keys()
    for name in expected:
        wrong = [*(expected[name] - found[name]), *(found[name] - expected[name])]
        assert not wrong, (name, wrong[:3])


def _packets(path: Path) -> tuple[bytes, list[bytes]]:
    data = path.read_bytes()
    order = "<" if data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    pos, packets = 24, []
    while pos + 16 <= len(data):
        (size,) = struct.unpack_from(order + "I", data, pos + 8)
        packets.append(data[pos : pos + 16 + size])
        pos += 16 + size
    return data[:24], packets


def _rotated(path: Path, parts: int | list[int], folder: Path) -> list[str]:
    """The capture as that many files, or cut behind those packets."""
    head, packets = _packets(path)
    if isinstance(parts, int):
        parts = [len(packets) * number // parts for number in range(1, parts)]
    folder.mkdir(exist_ok=True)
    names = []
    for number, (low, high) in enumerate(zip([0, *parts], [*parts, len(packets)], strict=True)):
        names.append(str(folder / f"part{number:03d}.pcap"))
        Path(names[-1]).write_bytes(head + b"".join(packets[low:high]))
    return names


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setitem(kept.KEEPING, name, value)


def _one_by_one(captures: list[str], out: Path, **options) -> list[str | None]:
    """Append each capture, those before being gone; why any was read again (then they are not)."""
    reasons = []
    hidden = Path(captures[0]).parent / "before"
    hidden.mkdir(exist_ok=True)
    for capture in captures:
        tables = kdissect.dissect(None, capture, out, append=True, **options)
        reasons.append(tables.manifest.get("append", {}).get("read_again"))
        assert "missing" not in tables.manifest["state"], tables.manifest["state"]
        shutil.move(capture, hidden)
    for path in hidden.iterdir():
        shutil.move(path, Path(captures[0]).parent)
    return reasons


# -- by state -------------------------------------------------------------------------------


@pytest.mark.spark
def test_the_next_file_of_a_rotation_goes_on_where_the_last_one_ended(spark, tmp_path):
    if not ROTATED:
        pytest.skip("no shared captures on this machine")
    out = tmp_path / "tables"
    first = kdissect.dissect(spark, ROTATED[:3], out, append=True)
    open_before = first.exchanges.to_pandas().status.eq("response_missing").sum()
    both = kdissect.dissect(spark, ROTATED[3:], out, append=True)
    assert both.manifest["append"] == {"read_again": None}
    _check(both, ROTATED)
    assert open_before
    assert [item["path"] for item in both.manifest["inputs"]] == [str(path) for path in ROTATED]


@pytest.mark.spark
def test_many_tasks_append_what_one_does(spark, tmp_path, monkeypatch):
    captures = _rotated(CAPTURES / "java_2_0_1.pcap", 3, tmp_path / "parts")
    monkeypatch.setattr(plan, "sized", lambda *_: (3, 20_000))
    out = tmp_path / "tables"
    for capture in captures:
        tables = kdissect.dissect(spark, capture, out, append=True, split_bytes=20_000)
        assert "missing" not in tables.manifest["state"]
    assert tables.manifest["append"] == {"read_again": None}
    _check(tables, captures)


@pytest.mark.parametrize("name", ["java_0_10_2_2", "java_2_0_1", "librdkafka"])
@pytest.mark.parametrize("size", ["usual", "small"])
def test_captures_that_are_gone_are_not_missed(name, size, tmp_path, in_process, request):
    if size == "small":
        request.getfixturevalue("small")
    captures = _rotated(CAPTURES / f"{name}.pcap", 5, tmp_path / "parts")
    out = tmp_path / "tables"
    assert _one_by_one(captures, out) == [None] * 5
    _check(kdissect.open(out), captures)
    manifest = json.loads((out / MANIFEST).read_text())
    listed = {name for entry in manifest["tables"].values() for name in entry["files"]}
    state = manifest["state"]
    listed |= {state["known"], *state["open"], *state["events"], MANIFEST}
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert there == listed
    assert manifest["totals"]["bytes"] == sum(os.path.getsize(path) for path in captures)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("old_clients/java_0_8_2_2", 1), ("old_clients/java_0_10_2_2", 3),
        ("shapes/drop1pct", 40), ("shapes/snap128", 40), ("shapes/midstream", 40),
        ("shapes/reordered", 40), ("shapes/duplicated", 40), ("sasl/sasl_handshake_v0", 5),
        ("transactions/transactions", 300), ("zookeeper/zk_1_1_1", 100), ("admin/admin", 60),
        ("share_streams/share", 80), ("share_streams/streams", 150), ("tls/tls12", 60),
    ],
)  # fmt: skip
def test_every_place_to_cut(name, step, tmp_path, in_process, small):
    path = SHARED / f"{name}.pcap"
    if not path.exists():
        pytest.skip("no shared captures on this machine")
    count = len(_packets(path)[1])
    fits = 0
    for place in range(1, count, step):
        captures = _rotated(path, [place], tmp_path / "parts")
        out = tmp_path / "tables"
        shutil.rmtree(out, ignore_errors=True)
        kdissect.dissect(None, captures[0], out)
        tables = kdissect.dissect(None, captures[1], out, append=True)
        fits += tables.manifest["append"]["read_again"] is None
        _check(tables, captures)
    # of messages with secrets that the snap length cut nothing is kept, so these are read again
    assert fits > len(range(1, count, step)) // 2 or name == "shapes/snap128"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["cluster/cluster", "java_latest/java_latest", "sasl/sasl"])
def test_connections_that_cross_many_files(name, tmp_path, in_process, small):
    path = SHARED / f"{name}.pcap"
    if not path.exists():
        pytest.skip("no shared captures on this machine")
    captures = _rotated(path, 9, tmp_path / "parts")
    out = tmp_path / "tables"
    for capture in captures:
        kdissect.dissect(None, capture, out, append=True)
    _check(kdissect.open(out), captures)


def test_decrypted_connections_end_what_is_kept(tmp_path, in_process):
    """What was open before joins plaintext that lies in no file; the append after it reads all."""
    early, tls = CAPTURES / "java_2_0_1.pcap", tmp_path / "tls13.pcap"
    tls.write_bytes(gzip.decompress((CAPTURES / "tls13.pcap.gz").read_bytes()))
    head, packets = _packets(tls)
    shift = struct.unpack_from("<I", _packets(early)[1][-1])[0] + 60
    shift -= struct.unpack_from("<I", packets[0])[0]
    for number, packet in enumerate(packets):
        (seconds,) = struct.unpack_from("<I", packet)
        packets[number] = struct.pack("<I", seconds + shift) + packet[4:]
    captures = _rotated(early, 2, tmp_path / "parts")
    _, rest = _packets(Path(captures[1]))
    Path(captures[1]).write_bytes(head + b"".join([*rest, *packets[:-1]]))
    captures.append(str(tmp_path / "parts" / "part002.pcap"))
    Path(captures[2]).write_bytes(head + packets[-1])
    options = {"keylog": CAPTURES / "tls13.keylog"}
    out = tmp_path / "tables"
    kdissect.dissect(None, captures[0], out, **options)
    both = _appended(out, captures[1], **options)
    assert both.manifest["append"] == {"read_again": None}
    assert "decrypted from their beginning" in both.manifest["state"]["missing"]
    _check(both, captures[:2], **options)
    every = _appended(out, captures[2], **options)
    assert "decrypted" in every.manifest["append"]["read_again"]
    _check(every, captures, **options)


# -- read again -----------------------------------------------------------------------------


def _appended(out: Path, captures, **options) -> kdissect.Tables:
    return kdissect.dissect(None, captures, out, append=True, **options)


@pytest.fixture
def halves(tmp_path, in_process):
    captures = _rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts")
    kdissect.dissect(None, captures[0], tmp_path / "tables")
    return captures, tmp_path / "tables"


def test_what_comes_before_the_end_is_read_with_all(tmp_path, in_process):
    captures = _rotated(CAPTURES / "librdkafka.pcap", 3, tmp_path / "parts")
    out = tmp_path / "tables"
    kdissect.dissect(None, [captures[0], captures[2]], out)
    tables = _appended(out, captures[1])
    reason = "the new captures begin before the end of those in the set"
    assert tables.manifest["append"] == {"read_again": reason}
    assert tables.notes == [f"the captures of {out} were read again: {reason}"]
    _check(tables, captures)


def test_a_name_told_late_reaches_rows_before(tmp_path, in_process):
    path = SHARED / "other_clients" / "sarama.pcap"
    if not path.exists():
        pytest.skip("no shared captures on this machine")
    captures = _rotated(path, 5, tmp_path / "parts")
    out = tmp_path / "tables"
    reasons = [_appended(out, one).manifest.get("append", {}).get("read_again")
               for one in captures]  # fmt: skip
    assert any("known by name alone" in (reason or "") for reason in reasons)
    _check(kdissect.open(out), captures)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ports": [9092]}, "new port hints"),
        ("state", "is gone"),
        ("version", "another version"),
        ("old", "has no state"),
    ],
)
def test_why_captures_are_read_again(change, reason, halves):
    captures, out = halves
    manifest = json.loads((out / MANIFEST).read_text())
    options = change if isinstance(change, dict) else {}
    if change == "state":
        shutil.rmtree(out / "_state")
    if change == "version":
        manifest["program_version"] = "0.0"
    if change == "old":
        del manifest["state"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    tables = _appended(out, captures[1], **options)
    assert reason in tables.manifest["append"]["read_again"]
    _check(tables, captures, **options)


def test_sets_that_keep_no_state_are_read_again(tmp_path, in_process):
    captures = _rotated(CAPTURES / "java_2_0_1.pcap", 2, tmp_path / "parts")
    out = tmp_path / "tables"
    first = kdissect.dissect(None, captures[0], out, payload="keys")
    assert "as captured" in first.manifest["state"]["missing"]
    _check(_appended(out, captures[1], payload="keys"), captures, payload="keys")


def test_a_capture_that_is_gone_and_needed_is_named_with_the_reason(halves):
    captures, out = halves
    shutil.rmtree(out / "_state")
    os.unlink(captures[0])
    with pytest.raises(kdissect.CaptureError, match=r"it is gone; it must be read again: .*known"):
        _appended(out, captures[1])


# -- care -----------------------------------------------------------------------------------


def test_a_capture_counts_once(halves):
    captures, out = halves
    before = (out / MANIFEST).read_bytes()
    again = _appended(out, captures[0])
    assert again.notes == [f"{captures[0]}: is in {out} already; left out"]
    assert (out / MANIFEST).read_bytes() == before
    both = _appended(out, captures)
    assert both.notes == again.notes
    _check(both, captures)
    Path(captures[1]).write_bytes(Path(captures[1]).read_bytes()[:-9])
    with pytest.raises(kdissect.CaptureError, match=r"it must be read again: .*not what it was"):
        _appended(out, captures[1])


def test_an_append_that_fails_leaves_the_set(halves, monkeypatch):
    captures, out = halves
    before = _rows(kdissect.open(out))
    real = os.replace

    def failing(source, target):
        if str(target).endswith(MANIFEST):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        _appended(out, captures[1])
    monkeypatch.setattr(os, "replace", real)
    assert _rows(kdissect.open(out)) == before
    tables = _appended(out, captures[1])
    assert tables.manifest["append"] == {"read_again": None}
    _check(tables, captures)


def test_secrets_are_not_kept(tmp_path, in_process):
    path = SHARED / "sasl" / "sasl.pcap"
    if not path.exists():
        pytest.skip("no shared captures on this machine")
    count = len(_packets(path)[1])
    for place in range(100, count, 150):
        captures = _rotated(path, [place], tmp_path / "parts")
        out = tmp_path / "tables"
        kdissect.dissect(None, captures[0], out, overwrite=True)
        raw = Path(captures[0]).read_bytes()
        tokens = [word for word in (b"alice-secret", b"bob-secret") if word in raw]
        tokens += {raw[at - 40 : at] for at in _plain_tokens(raw)}
        state = b"".join(
            part for file in (out / "_state").glob("*") for part in read_state(str(file))
        )
        assert state or "missing" in kdissect.open(out).manifest["state"]
        for token in tokens:
            assert token not in state


def _plain_tokens(raw: bytes) -> list[int]:
    """Where PLAIN tokens (NUL user NUL password) of SaslAuthenticate end."""
    found, at = [], raw.find(b"\0alice\0")
    while at >= 0:
        found.append(at + 20)
        at = raw.find(b"\0alice\0", at + 1)
    return found


def _set(tmp_path, **options):
    capture = tmp_path / "a.pcap"
    shutil.copy(CAPTURES / "java_2_0_1.pcap", capture)
    out = tmp_path / "tables"
    kdissect.read(capture, **options).write(out)
    return str(capture), str(out)


def test_captures_and_hints_of_both_are_read(tmp_path):
    capture, out = _set(tmp_path, ports=[9092])
    paths, options = extended(out, ["b.pcap", capture], Options(ports=(9093,)))
    assert paths == [capture, "b.pcap"]
    assert options.ports == (9092, 9093)
    paths, options = extended(str(tmp_path / "none"), ["b.pcap"], Options())
    assert (paths, options) == (["b.pcap"], Options())


def test_a_set_made_otherwise_is_not_mixed(tmp_path):
    _, out = _set(tmp_path, payload="keys")
    with pytest.raises(OutputError, match="made with payload = 'keys', not 'full'"):
        extended(out, ["b.pcap"], Options())


def test_a_capture_that_is_gone_is_said(tmp_path):
    capture, out = _set(tmp_path)
    with open(capture, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(kdissect.CaptureError, match="it has 1000 now"):
        extended(out, ["b.pcap"], Options())
    (tmp_path / "a.pcap").unlink()
    with pytest.raises(kdissect.CaptureError, match="it is gone"):
        extended(out, ["b.pcap"], Options())
