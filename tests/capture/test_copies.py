"""Copies of captures for a host: made once, whole, and of the version that was described."""

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kdissect.capture import copies
from kdissect.capture.copies import local_path, spooled
from kdissect.capture.inputs import UNSEEN, find_captures
from kdissect.errors import EnvironmentFailed
from tests.conftest import CAPTURES
from tests.objects import Store

CAPTURE = CAPTURES / "java_2_0_1.pcap"


def test_an_object_is_copied_once_for_all_tasks(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that need it at the same time wait for one copy, which is read in several ranges."""
    monkeypatch.setattr(copies, "REQUEST_BYTES", 50_000)
    (file,) = find_captures([store.put("once.pcap", CAPTURE)])
    store.requests.clear()
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: local_path(file, str(tmp_path)), range(4)))
    assert len(set(paths)) == 1
    assert Path(paths[0]).read_bytes() == CAPTURE.read_bytes()
    assert store.get_bytes("once.pcap") == file.size


def test_objects_under_a_prefix_are_not_opened_by_the_listing(store: Store, tmp_path: Path) -> None:
    """The task that walks over an object is the first to read it."""
    store.put("day/a.pcap.gz", gzip.compress(CAPTURE.read_bytes()))
    store.put("day/notes.txt", b"no capture")
    store.requests.clear()
    files = find_captures([store.url("day")])
    assert [file.format for file in files] == [UNSEEN, UNSEEN]
    assert {method for method, _, span in store.requests if span} == set()
    seen = [spooled(file, str(tmp_path)) for file in files]
    expected = [("pcap", "gzip"), ("unknown", "none")]
    assert [(file.format, file.compression) for file in seen] == expected
    assert Path(local_path(seen[0], str(tmp_path))).read_bytes() == CAPTURE.read_bytes()


def test_an_object_that_changed_is_not_copied(store: Store, tmp_path: Path) -> None:
    """Other content than the plan has seen is an error with both sizes; no copy stays."""
    (file,) = find_captures([store.put("changing.pcap", CAPTURE)])
    store.put("changing.pcap", CAPTURE.read_bytes() + bytes(16))
    with pytest.raises(EnvironmentFailed, match=r"changing\.pcap: changed from \d+ to \d+ bytes"):
        local_path(file, str(tmp_path))
    with pytest.raises(EnvironmentFailed, match=r"changing\.pcap: changed while"):
        local_path(replace(file, size=file.size + 16), str(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock", ".lock"]


def test_another_host_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without the run's folder copies into Spark's, and removes copies of old runs."""
    path = tmp_path / "a.pcap.gz"
    path.write_bytes(gzip.compress(CAPTURE.read_bytes()))
    (file,) = find_captures([path])
    local = tmp_path / "local"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{local},/elsewhere")
    copy = Path(local_path(file, "/no/such/kdissect-spool-1"))
    assert copy.parent == local / "kdissect-spool-1"
    assert copy.read_bytes() == CAPTURE.read_bytes()
    monkeypatch.setattr(copies, "_KEPT_S", -1.0)
    assert local_path(file, "/no/such/kdissect-spool-1") == str(copy)
    local_path(file, "/no/such/kdissect-spool-2")
    assert [folder.name for folder in local.iterdir()] == ["kdissect-spool-2"]


def test_a_failing_store_leaves_no_part(store: Store, tmp_path: Path) -> None:
    """The error names the bytes; what was copied so far is removed."""
    (file,) = find_captures([store.put("broken.pcap", CAPTURE)])
    lock = threading.Lock()
    asked: list[tuple[int, int]] = []

    def fault(method: str, path: str, span: tuple[int, int] | None) -> int:
        with lock:
            if method == "GET" and span:
                asked.append(span)
            return 403 if method == "GET" and span else 0

    message = r"broken\.pcap: bytes 0 to \d+ cannot be read"
    with store.failing(fault), pytest.raises(EnvironmentFailed, match=message):
        local_path(file, str(tmp_path))
    assert asked
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
