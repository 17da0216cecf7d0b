"""Captures in an object store: an S3 server on loopback gives what the files give."""

from __future__ import annotations

import pytest

import kdissect
from kdissect.capture import object_store as remote
from kdissect.pipeline.append import extended
from kdissect.pipeline.options import Options
from tests.conftest import CAPTURES
from tests.objects import object_store


@pytest.fixture(scope="module")
def bucket():
    """A bucket with captures and another file; the environment says where it is."""
    with object_store() as store:
        store.put("day1/java.pcap", CAPTURES / "java_2_0_1.pcap")
        store.put("day1/deep/sarama.pcap.gz", CAPTURES / "sarama.pcap.gz")
        store.put("day1/README.md", CAPTURES / "README.md")
        yield f"s3a://{store.bucket}"


def _exchanges(tables: kdissect.Tables) -> list[tuple]:
    columns = ["api_name", "correlation_id", "request_time_ns", "response_size", "topics"]
    rows = tables.exchanges.to_arrow(columns).to_pylist()
    return sorted(tuple(map(str, row.values())) for row in rows)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("day1/java.pcap", ["java_2_0_1.pcap"]),
        ("day1/deep/sarama.pcap.gz", ["sarama.pcap.gz"]),
        ("day1/*.pcap", ["java_2_0_1.pcap"]),
        ("**/*.pcap*", ["java_2_0_1.pcap", "sarama.pcap.gz"]),
        ("day1", ["java_2_0_1.pcap", "sarama.pcap.gz"]),
        ("day[12]/java.pcap", ["java_2_0_1.pcap"]),
    ],
)
def test_the_rows_of_the_files(bucket, name, files, tmp_path):
    found = kdissect.read(f"{bucket}/{name}", spool=str(tmp_path))
    assert _exchanges(found) == _exchanges(kdissect.read([CAPTURES / file for file in files]))
    captures = found.captures.to_arrow().filter(~kdissect_unknown(found))
    assert all(path.startswith(f"{bucket}/day1/") for path in captures["path"].to_pylist())
    assert not list(tmp_path.iterdir())


def kdissect_unknown(tables: kdissect.Tables):
    """bool[n]: rows of `captures` that are no captures."""
    import pyarrow.compute as pc

    return pc.equal(tables.captures.to_arrow()["format"], "unknown").to_numpy()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("day2/x.pcap", "no such file"),
        ("day1/*.cap", "no such file"),
        ("day1/README.md", "not a pcap or pcapng file"),
    ],
)
def test_what_is_not_there_is_said(bucket, name, words):
    with pytest.raises(kdissect.CaptureError, match=words):
        kdissect.read(f"{bucket}/{name}")


def test_a_store_that_cannot_be_reached_is_said(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    remote._s3.cache_clear()
    with pytest.raises(kdissect.CaptureError, match=r"s3://nowhere/x\.pcap"):
        kdissect.read("s3://nowhere/x.pcap")
    remote._s3.cache_clear()
    with pytest.raises(kdissect.CaptureError, match=r"ftp://host/x\.pcap"):
        kdissect.read("ftp://host/x.pcap")


def test_appending_reads_them_again(bucket, tmp_path):
    out = str(tmp_path / "tables")
    kdissect.read(f"{bucket}/day1/java.pcap").write(out)
    paths, _ = extended(out, ["next.pcap"], Options())
    assert paths == [f"{bucket}/day1/java.pcap", "next.pcap"]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("b/*.pcap", "b/a.pcap", True),
        ("b/*.pcap", "b/c/a.pcap", False),
        ("b/**/*.pcap", "b/a.pcap", True),
        ("b/**/*.pcap", "b/c/d/a.pcap", True),
        ("b/a?.[pz]cap", "b/a1.pcap", True),
        ("b/a?.[!p]cap", "b/a1.pcap", False),
        ("b/a+.pcap", "b/aa.pcap", False),
    ],
)
def test_globs_are_those_of_files(pattern, path, matches):
    import re

    assert (re.fullmatch(remote._translated(pattern), path) is not None) == matches
