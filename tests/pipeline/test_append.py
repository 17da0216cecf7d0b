"""--append: the table set of all captures, whenever each of them came."""

from __future__ import annotations

import shutil

import pytest

import kdissect
from kdissect.errors import OutputError
from kdissect.pipeline.append import extended
from kdissect.pipeline.options import Options
from tests.conftest import CAPTURES, ROOT

ROTATED = sorted((ROOT.parent / "shared" / "captures" / "shapes").glob("rotated_*.pcap"))


def _rows(tables: kdissect.Tables) -> dict[str, list[str]]:
    return {
        name: sorted(str(row) for row in tables[name].to_arrow().to_pylist())
        for name in tables.names
    }


@pytest.mark.spark
def test_the_next_file_of_a_rotation_goes_on_where_the_last_one_ended(spark, tmp_path):
    if not ROTATED:
        pytest.skip("no shared captures on this machine")
    out = tmp_path / "tables"
    first = kdissect.dissect(spark, ROTATED[:3], out, append=True)
    open_before = first.exchanges.to_pandas().status.eq("response_missing").sum()
    both = kdissect.dissect(spark, ROTATED[3:], out, append=True)
    assert _rows(both) == _rows(kdissect.read(ROTATED))
    assert open_before
    assert [item["path"] for item in both.manifest["inputs"]] == [str(path) for path in ROTATED]


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
