"""`kdissect diff` as a user meets it."""

import json
from pathlib import Path

import pytest

import kdissect as package
from tests.builders.messages import exchange, write_capture
from tests.processes import Run


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("diff")
    for name in ("java_0_10_2_2", "java_2_0_1"):
        package.read(captures / f"{name}.pcap").write(folder / name)
    return str(folder / "java_0_10_2_2"), str(folder / "java_2_0_1")


def test_fail_on_decides_the_exit_code(kdissect: Run, sets: tuple[str, str]) -> None:
    """Without --fail-on the exit code is 0; with it, 1 for a kind that changed."""
    shown = kdissect("diff", *sets)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "~ Produce" in shown.stdout
    failed = kdissect("diff", *sets, "--fail-on", "errors,versions")
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1] == "Failed on versions"
    assert kdissect("diff", sets[0], sets[0], "--fail-on", "versions,clients").returncode == 0


def test_too_little_traffic_is_no_equality(kdissect: Run, tmp_path: Path) -> None:
    """What was not compared is not among what did not change."""
    path = write_capture(tmp_path / "one.pcap", [exchange(1, 3, 5, {}, {})])
    lines = kdissect("diff", str(path), str(path)).stdout.splitlines()
    (same,) = (line for line in lines if line.startswith("No change found"))
    assert "latency" not in same
    (unknown,) = (line for line in lines if line.startswith("Too little traffic"))
    assert "latency" in unknown


def test_json_is_one_document(kdissect: Run, sets: tuple[str, str]) -> None:
    """--json prints one document with its version and the reasons to fail."""
    result = kdissect("diff", *sets, "--fail-on", "apis", "--json")
    document = json.loads(result.stdout)
    assert document["format_version"] == 1
    assert document["failed_on"] == ["apis"]
    assert result.returncode == 1
