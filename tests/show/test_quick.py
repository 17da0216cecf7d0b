"""What is printed before kernels are loaded is what the usual way prints first."""

import os
from pathlib import Path

import pytest

from kdissect.pipeline.options import Options
from kdissect.show import quick
from kdissect.show.filters import Filters
from kdissect.show.loop import Style, show
from kdissect.show.quick import first_lines
from tests.show.conftest import SHIPPED, shared, shown

CASES = [
    *SHIPPED,
    *shared(
        "cluster/cluster.pcap",
        "odd/odd_conversations.pcap",
        "old_clients/java_0_8_2_2.pcap",
        "sasl/sasl.pcap",
        "shapes/any_sll2.pcap",
        "shapes/drop1pct.pcap",
        "shapes/duplicated.pcap",
        "shapes/ipv6.pcap",
        "shapes/rawip.pcap",
        "shapes/reordered.pcap",
        "shapes/rotated_00001.pcap",
        "shapes/rotated_00004.pcap",
        "shapes/sll1.pcap",
        "tls/tls12.pcap",
        "transactions/transactions.pcap",
        "version_sweep/sweep_4_3_1.pcap",
        "zookeeper/zk_3_9_1_ibp_2_4.pcap",
        quickly=("any_sll2.pcap", "ipv6.pcap", "rotated_00004.pcap", "transactions.pcap"),
    ),
]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_quick_lines_come_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letter by letter; and the usual way leaves out just these."""
    monkeypatch.setattr(quick, "SECONDS", 60)
    monkeypatch.setattr(quick, "LINES", 1000)
    for colour in (False, True):
        told = list(first_lines(os.fspath(path), colour))
        usual = shown(path, Style(colour=colour))
        assert [one.line for one in told] == usual[: len(told)]
        rest: list[bytes] = []
        printed = {one.packets for one in told}
        style = Style(colour=colour)
        show([os.fspath(path)], Options(), Filters(), style, rest.append, str, printed)
        assert b"".join(rest).decode().splitlines() == usual[len(told) :]


def test_a_plain_capture_has_quick_lines(captures: Path) -> None:
    """Most of a usual beginning can be told so."""
    assert len(list(first_lines(os.fspath(captures / "java_2_0_1.pcap"), False))) > 20


@pytest.mark.parametrize("cut", [0, 3, 20, 24, 30, 500, 3000])
def test_what_is_cut_or_no_capture_gives_nothing_wrong(
    cut: int, captures: Path, tmp_path: Path
) -> None:
    """A file that ends anywhere."""
    path = tmp_path / "cut.pcap"
    path.write_bytes((captures / "librdkafka.pcap").read_bytes()[:cut])
    lines = [told.line for told in first_lines(os.fspath(path), False)]
    assert lines == shown(captures / "librdkafka.pcap")[: len(lines)]
    assert list(first_lines(os.fspath(tmp_path / "none.pcap"), False)) == []


def test_damaged_bytes_end_it(captures: Path, tmp_path: Path) -> None:
    """No byte makes it fail: it may only say less."""
    data = bytearray((captures / "java_2_0_1.pcap").read_bytes()[:6000])
    path = tmp_path / "damaged.pcap"
    for place in range(24, 3000, 23):
        before = data[place]
        data[place] ^= 0xFF
        path.write_bytes(data)
        list(first_lines(os.fspath(path), False))
        data[place] = before
