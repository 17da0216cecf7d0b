"""Captures in an object store and tables in one, on Spark: the rows of a local run."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.capture import object_store as remote
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.pipeline import task_table
from kdissect.pipeline.append import ReadAgainError, append_plan
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import capture_id as capture_id_of
from tests.builders.tables import all_rows, set_files
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.objects import Store
from tests.pipeline.appending import check, rotated

pytestmark = pytest.mark.spark


def rows_as_local(tables: kdissect.Tables, url: str, path: Path) -> dict[str, list[str]]:
    """Rows with the ids and paths of a local input instead of those of an object."""
    ids = tables.captures.to_arrow(["capture_id"])["capture_id"].to_pylist()
    found = {}
    local = capture_id_of(str(path))
    for name, lines in all_rows(tables).items():
        text = [line.replace(url, str(path)) for line in lines]
        for capture_id in ids:
            text = [line.replace(str(capture_id), str(local)) for line in text]
        found[name] = sorted(text)
    return found


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of objects that this process, the driver, reads; its workers are others."""
    counts: list[int] = []
    opened = remote.opened

    class Counting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def read_at(self, count: int, pos: int) -> bytes:
            data: bytes = self._file.read_at(count, pos)
            counts.append(len(data))
            return data

        def __getattr__(self, name: str) -> Any:
            assert name in ("version", "close"), name
            return getattr(self._file, name)

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

    monkeypatch.setattr(remote, "opened", lambda url: Counting(opened(url)))
    return counts


@cases("split_bytes", [70_000], heavy=[None])
def test_rows_of_the_local_file(
    spark: Any,
    store: Store,
    read_here: list[int],
    split_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks copy an object once, and write the rows of the local file."""
    monkeypatch.setattr(task_table, "TABLE_BYTES", 0)  # tables for tasks are objects too
    path = CAPTURES / "java_0_10_2_2.pcap"  # few tables: each is a request or more
    name = f"day{split_bytes}/java.pcap"
    url = store.put(name, path)
    out = store.url(f"tables{split_bytes}/")
    store.requests.clear()
    tables = kdissect.dissect(spark, url, out, split_bytes=split_bytes)
    assert sum(read_here) < 100, "the driver reads the first bytes, to know what it is"
    assert store.get_bytes(name) < 1.01 * path.stat().st_size
    expected = all_rows(kdissect.read(path))
    assert rows_as_local(tables, url, path) == expected
    assert rows_as_local(kdissect.open(out), url, path) == expected
    (item,) = tables.manifest["inputs"]
    assert (item["path"], item["size"]) == (url, path.stat().st_size)
    assert item["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(item["etag"]) >= 32
    assert store.names(f"tables{split_bytes}") == set_files(out)


@pytest.mark.heavy
def test_the_folder_with_all_kinds(spark: Any, store: Store, tmp_path: Path) -> None:
    """Compressed captures are spooled, other files listed, TLS decrypted with secrets at hand."""
    names = ("java_0_10_2_2.pcap", "java_2_0_1.pcap", "sarama.pcap.gz", "tls13.pcap.gz")
    for name in names:
        store.put(f"all/{name}", CAPTURES / name)
    store.put("all/notes.txt", b"no capture")
    keylog = CAPTURES / "tls13.keylog"
    found = kdissect.dissect(
        spark, store.url("all"), tmp_path / "out", keylog=keylog, split_bytes=30_000
    )
    local = kdissect.read([CAPTURES / name for name in names], keylog=keylog)
    for name in ("connections", "exchanges", "records", "record_batches", "group_events"):
        assert found[name].num_rows == local[name].num_rows, name
    formats = found.captures.to_arrow(["format"])["format"].to_pylist()
    assert sorted(formats) == ["pcap"] * 4 + ["unknown"]
    assert sum(item["is_capture"] for item in found.manifest["inputs"]) == 4


@cases("session", ["in_process"], heavy=["spark"])
def test_an_append_in_a_store(
    session: str, store: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The state lies beside the tables; a run reads the new objects only, and no other version."""
    spark = request.getfixturevalue(session)
    parts = rotated(CAPTURES / "java_2_0_1.pcap", [581, 840], tmp_path / "parts")
    urls = [store.put(f"parts/{Path(part).name}", Path(part)) for part in parts]
    out = store.url(f"appended-{session}")
    first = kdissect.dissect(spark, urls[0], out, keep_state=True)
    assert first.manifest["state"]["counts"]["open_exchanges"] > 0
    store.requests.clear()
    tables = kdissect.dissect(spark, urls[:2], out, append=True)
    assert tables.manifest["append"] == {"read_again": None}
    assert tables.notes[0] == f"{urls[0]}: is in {out} already; left out"
    assert store.get_bytes("parts/part000.pcap") < 100, "its first bytes say what it is"
    check(tables, urls[:2])
    notes = store.put("parts/notes.txt", b"no capture")
    named_again = append_plan(out, [store.url("parts/*[01s].[pt]*")], Options())
    assert named_again is not None
    assert named_again.inputs == []
    assert named_again.notes[-1] == f"{notes}: not a pcap or pcapng file; left out"
    store.put("parts/part000.pcap", Path(parts[0]).read_bytes() + bytes(16))
    with pytest.raises(ReadAgainError, match=r"part000\.pcap is not what it was"):
        append_plan(out, [urls[0], urls[2]], Options())


def test_a_range_that_cannot_be_read(
    spark: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the object and the place; nothing is left."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url = store.put("broken.pcap", CAPTURES / "java_0_10_2_2.pcap")

    def fault(method: str, path: str, span: tuple[int, int] | None) -> int:
        if method != "GET" or path != "/far/broken.pcap" or span is None:
            return 0
        return 500 if span[1] > 100 else 0  # the first bytes only say what it is

    message = r"^s3://far/broken\.pcap: bytes \d+ to \d+ cannot be read: [^\n]*$"
    with store.failing(fault), pytest.raises(EnvironmentFailed, match=message):
        kdissect.dissect(spark, url, store.url("broken"), split_bytes=100_000)
    assert not store.names("broken")


@pytest.mark.usefixtures("in_process")
def test_a_refused_object_is_an_error(store: Store, tmp_path: Path) -> None:
    """A refused object is one clear error, and nothing is written."""
    url = store.put("secret.pcap", CAPTURES / "java_2_0_1.pcap")
    refused = store.failing(lambda method, path, span: 403 if path == "/far/secret.pcap" else 0)
    with refused, pytest.raises(CaptureError, match=r"^s3://far/secret\.pcap: .*ACCESS_DENIED"):
        kdissect.dissect(None, url, tmp_path / "out")
    assert not (tmp_path / "out").exists()
