"""Captures in parts, appended to a table set, against one run over all parts."""

import gzip
from collections import Counter
from pathlib import Path

from cramjam import zstd

import kdissect
from kdissect.pipeline.saved_state import read_state
from tests.builders.captures import split_capture
from tests.conftest import CAPTURES

COUNTED = ("late_packets", "late_names", "carry_limit")
COMPRESSIONS = {".gz": gzip, ".zst": zstd}


def check(tables: kdissect.Tables, captures, **options) -> None:
    """Check that each exchange is there once, as in one run; that those without a whole response
    alone are missing; and that the connections are those of one run, but for client ids that only
    missing exchanges have."""
    whole = kdissect.read(captures, **options)
    expected, found = exchanges(whole), exchanges(tables)
    assert len(found) == tables.exchanges.num_rows
    has_late_names = counted(tables)["late_names"] > 0
    for ident, row in found.items():
        assert has_late_names or row == expected[ident]
        assert row | {"topics": None} == expected[ident] | {"topics": None}
    faults = whole.anomalies.to_pylist()
    partial = {fault["exchange_id"] for fault in faults if fault["kind"] == "partial_frame"}
    missing = expected.keys() - found.keys()
    assert all(expected[ident]["response_time"] is None for ident in missing - partial)
    unnamed = {expected[ident]["connection_id"] for ident in missing}
    pairs = zip(connections(tables), connections(whole), strict=True)
    for row, wanted in pairs:
        if row["connection_id"] in unnamed:
            assert set(row["client_ids"]) <= set(wanted["client_ids"])
            row["client_ids"] = wanted["client_ids"]
        assert row == wanted


def connections(tables: kdissect.Tables) -> list[dict]:
    return tables.connections.to_arrow().sort_by("connection_id").to_pylist()


def exchanges(tables: kdissect.Tables) -> dict[int, dict]:
    return {row["exchange_id"]: row for row in tables.exchanges.to_pylist()}


def counted(tables: kdissect.Tables) -> Counter:
    kinds = Counter(tables.anomalies.to_arrow()["kind"].to_pylist())
    return Counter({kind: kinds[kind] for kind in COUNTED if kinds[kind]})


def rotated(path: Path, parts: int | list[int], folder: Path, compression: str = "") -> list[str]:
    """The capture in so many files, or cut after those packets."""
    head, packets = split_capture(path.read_bytes())
    if isinstance(parts, int):
        parts = [len(packets) * number // parts for number in range(1, parts)]
    folder.mkdir(exist_ok=True)
    names = []
    for number, (low, high) in enumerate(zip([0, *parts], [*parts, len(packets)], strict=True)):
        names.append(str(folder / f"part{number:03d}.pcap{compression}"))
        data = head + b"".join(packets[low:high])
        if compression:
            data = bytes(COMPRESSIONS[compression].compress(data))
        Path(names[-1]).write_bytes(data)
    return names


def plain(path: Path, folder: Path) -> Path:
    """The capture without its compression."""
    if path.suffix not in COMPRESSIONS:
        return path
    plain = folder / path.stem
    plain.write_bytes(bytes(COMPRESSIONS[path.suffix].decompress(path.read_bytes())))
    return plain


def saved_bytes(out: Path) -> bytes:
    """All values of the state of a set, as bytes."""
    tables = (read_state(str(file)) for file in (out / "_state").rglob("*.parquet"))
    columns = (column.to_pylist() for table in tables for column in table.columns)
    return b"".join(
        value if isinstance(value, bytes) else str(value).encode()
        for values in columns
        for value in values
    )


def appended(out: Path, captures, **options) -> kdissect.Tables:
    return kdissect.dissect(None, captures, out, append=True, **options)


def check_cuts(path: Path, count: int, tmp_path: Path) -> Counter:
    """Cut the capture at so many places and append the second part; how many were appended."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    path = plain(path, tmp_path)
    keylog = path.with_suffix(".keylog")
    if not keylog.exists():
        keylog = CAPTURES / keylog.name
    options = {"keylog": keylog} if keylog.exists() else {}
    total = len(split_capture(path.read_bytes())[1])
    done: Counter = Counter()
    for place in sorted({max(1, total * n // (count + 1)) for n in range(1, count + 1)}):
        captures = rotated(path, [place], tmp_path / "parts", compression)
        out = tmp_path / "tables"
        kdissect.dissect(None, captures[0], out, overwrite=out.exists(), keep_state=True, **options)
        tables = kdissect.dissect(None, captures[1], out, append=True, **options)
        done[tables.manifest["append"]["read_again"]] += 1
        if not counted(tables)["carry_limit"]:  # within a message with secrets
            check(tables, captures, **options)
    return done
