"""Captures in an S3 server on loopback give the rows of the files."""

import functools

import pytest

import kdissect
from kdissect.capture import object_store as remote
from kdissect.errors import EnvironmentFailed
from kdissect.pipeline.append import extended
from kdissect.pipeline.options import Options
from tests.conftest import CAPTURES
from tests.objects import object_store, refusing_each_once


@pytest.fixture(scope="module")
def store():
    """A bucket with captures and another file; the environment says where it is."""
    with object_store() as store:
        store.put("day1/java.pcap", CAPTURES / "java_2_0_1.pcap")
        store.put("day1/deep/sarama.pcap.gz", CAPTURES / "sarama.pcap.gz")
        store.put("day1/README.md", CAPTURES / "README.md")
        yield store


@pytest.fixture(scope="module")
def bucket(store):
    return f"s3a://{store.bucket}"


@pytest.fixture
def pauses(monkeypatch):
    """The longest pauses before repeated reads; the tests skip the waiting."""
    longest: list[float] = []
    monkeypatch.setattr(remote.random, "uniform", lambda _, most: longest.append(most) or 0.0)
    return longest


def _exchanges(tables: kdissect.Tables) -> list[tuple]:
    columns = ["api_name", "correlation_id", "request_time_ns", "response_size", "topics"]
    rows = tables.exchanges.to_arrow(columns).to_pylist()
    return sorted(tuple(map(str, row.values())) for row in rows)


@functools.cache
def _exchanges_of(*files: str) -> list[tuple]:
    """The exchanges of files on disk."""
    return _exchanges(kdissect.read([CAPTURES / file for file in files]))


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
    """A URL, folder or glob gives the exchanges of the files; no copy stays."""
    found = kdissect.read(f"{bucket}/{name}", spool=str(tmp_path))
    assert _exchanges(found) == _exchanges_of(*files)
    captures = found.captures.to_arrow(["format", "path"]).to_pylist()
    paths = [row["path"] for row in captures if row["format"] != "unknown"]
    assert all(path.startswith(f"{bucket}/day1/") for path in paths)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("day2/x.pcap", "no such file"),
        ("day1/*.cap", "no such file"),
        ("day1/README.md", "not a pcap or pcapng file"),
    ],
)
def test_a_missing_object_is_one_line(bucket, name, words):
    """CaptureError has the reason."""
    with pytest.raises(kdissect.CaptureError, match=words):
        kdissect.read(f"{bucket}/{name}")


def test_an_unreachable_store_is_one_line(monkeypatch):
    """CaptureError has the URL, also for an unknown scheme."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    remote._s3.cache_clear()
    with pytest.raises(kdissect.CaptureError, match=r"s3://nowhere/x\.pcap"):
        kdissect.read("s3://nowhere/x.pcap")
    remote._s3.cache_clear()
    with pytest.raises(kdissect.CaptureError, match=r"ftp://host/x\.pcap"):
        kdissect.read("ftp://host/x.pcap")


def test_each_request_may_fail_once(store, bucket, tmp_path, pauses):
    """Listings, HEADs, the probe of four bytes and reads: refused with a body, as stores do."""
    with refusing_each_once(store) as refused:
        found = kdissect.read(f"{bucket}/day1/**/*.pcap*", spool=str(tmp_path))
    assert _exchanges(found) == _exchanges_of("java_2_0_1.pcap", "sarama.pcap.gz")
    assert {method for method, _, _ in refused} == {"HEAD", "GET"}
    assert ("GET", "/captures/day1/java.pcap", (0, 3)) in refused
    assert set(pauses) == {1}


def test_a_short_range_is_tried_so_often(store, bucket, pauses, monkeypatch):
    """Its error says nothing, so it counts as one that may pass: the bound and the pauses are
    those of all requests."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    asked: list[tuple[int, int]] = []

    def fault(method, path, span):
        if method != "GET" or span is None:
            return 0
        asked.append(span)
        return 503

    message = r"java\.pcap: bytes 0 to 4 cannot be read"
    with store.failing(fault), pytest.raises(EnvironmentFailed, match=message):
        kdissect.read(f"{bucket}/day1/java.pcap")
    assert asked == [(0, 3)] * 4
    assert pauses == [1, 2, 4]


def test_a_compressed_object_that_cannot_be_read_is_not_damaged(store, bucket, monkeypatch):
    """The store's failure ends the run; the rows of the first half are not those of the object."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    remote._s3.cache_clear()
    behind = store.failing(lambda method, path, span: 503 if span and span[0] > 0 else 0)
    message = r"sarama\.pcap\.gz: bytes \d+ to \d+ cannot"
    with behind, pytest.raises(EnvironmentFailed, match=message):
        kdissect.read(f"{bucket}/day1/deep/sarama.pcap.gz")
    remote._s3.cache_clear()


def is_short(method, path, span):
    return bool(span and span[1] - span[0] < 300)


def test_tables_are_read_by_the_same_policy(store, pauses):
    """A column of a few values is a range shorter than the body of a refusal."""
    out = store.url("tables")
    kdissect.read(CAPTURES / "java_2_0_1.pcap").write(out)
    tables = kdissect.open(out)
    query = "select distinct status from exchanges order by all"
    expected = tables.sql(query).to_pylist()
    with refusing_each_once(store, is_short) as refused:
        assert tables.sql(query).to_pylist() == expected
        assert refused
        refused.clear()
        statuses = set(tables.exchanges.to_arrow(["status"])["status"].to_pylist())
        assert refused
    assert statuses == {row["status"] for row in expected}
    always = store.failing(lambda *request: 503 if is_short(*request) else 0)
    with always, pytest.raises(EnvironmentFailed, match="GetObject"):
        tables.sql(query)


def test_appending_reads_them_again(bucket, tmp_path):
    """A set of objects is extended by reading them again."""
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
        ("b/**/a.pcap", "b/aa.pcap", False),
        ("b/a?.[pz]cap", "b/a1.pcap", True),
        ("b/a?.[!p]cap", "b/a1.pcap", False),
        ("b/a+.pcap", "b/aa.pcap", False),
    ],
)
def test_globs_are_those_of_files(pattern, path, matches):
    """A pattern matches the paths that it matches on disk."""
    assert remote._matches(path.split("/"), pattern.split("/")) == matches
