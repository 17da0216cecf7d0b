"""`kdissect readiness` as a user meets it."""

import csv
import shlex
from pathlib import Path

import pytest

import kdissect as package
from tests.conftest import ROOT
from tests.processes import KDISSECT, Run, run


@pytest.mark.parametrize(
    ("fail_on", "code"), [([], 0), (["--fail-on", "breaks"], 0), (["--fail-on", "unknown"], 1)]
)
def test_fail_on_includes_verdicts_that_are_not_established(
    kdissect: Run, table_set: Path, fail_on: list[str], code: int
) -> None:
    """Consumers of the KIP-848 protocol depend on a setting of 3.9: not established."""
    result = kdissect("readiness", str(table_set), "--target", "3.9", *fail_on)
    assert result.returncode == code, result.stderr
    assert "Established for 7 of 9 clients, " in result.stdout.splitlines()[1]
    assert "group.coordinator.rebalance.protocols=classic,consumer" in result.stdout


def test_the_inventory_of_a_set_and_a_capture(
    kdissect: Run, table_set: Path, tmp_path: Path, captures: Path
) -> None:
    """The file has the clients of both; those of the later capture are new, the others gone."""
    out = tmp_path / "clients.csv"
    later = captures / "java_2_0_1.pcap"
    options = ("--inventory", str(out), "--since", "2026-11-21T02:18:00Z")
    done = kdissect("readiness", str(table_set), str(later), "--target", "4.0", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Clients since 2026-11-21T02:18:00Z: 9 new, 9 gone, 0 changed, 0 same" in done.stdout
    assert done.stdout.splitlines()[-1] == f"Inventory: {out} (18 clients and 3 brokers)"
    with out.open(newline="") as file:
        rows = {row["client_id"]: row for row in csv.DictReader(file)}
    assert rows["java-2.0.1-gzip"]["change"] == "new"
    assert rows["rdkafka-gzip"]["change"] == "gone"
    assert rows["rdkafka-gzip"]["topics_written"] == "rd-events"


def test_a_client_id_does_not_steer_the_terminal(
    tmp_path: Path, kdissect: Run, captures: Path
) -> None:
    """A client id does not reach the terminal's controls."""
    raw = (captures / "librdkafka.pcap").read_bytes()
    (tmp_path / "x.pcap").write_bytes(raw.replace(b"rdkafka", b"rd\x1b[31m"))
    package.read(tmp_path / "x.pcap").write(tmp_path / "tables")
    shown = kdissect("readiness", str(tmp_path / "tables"), "--target", "2.4")
    assert "\x1b" not in shown.stdout
    assert "rd\\x1b[31m" in shown.stdout


def test_a_closed_pipe(table_set: Path) -> None:
    """A reader that has had enough changes neither the exit code nor stderr."""
    command = shlex.join([*KDISSECT, "readiness", str(table_set)])
    script = f"{command} --target 2.4 --json | head -c 5; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", script)
    assert (done.returncode, done.stderr) == (1, "")


def test_quiet_leaves_the_exit_code(kdissect: Run, tmp_path: Path) -> None:
    """A CI job gets the code alone."""
    tables = tmp_path / "tables"
    package.read(ROOT / "captures" / "java_0_10_2_2.pcap").write(tables)
    done = kdissect("readiness", str(tables), "--target", "4.0", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
