"""The examples that `kdissect VERB --help` shows run as they stand."""

import re
import subprocess
from pathlib import Path

import pytest

from kdissect.cli.diff import DIFF_EXAMPLES
from kdissect.cli.readiness import READINESS_EXAMPLES
from kdissect.cli.sql import SQL_EXAMPLES
from tests import console

EXAMPLES = [
    line.strip()
    for text in (SQL_EXAMPLES, READINESS_EXAMPLES, DIFF_EXAMPLES)
    for line in text.splitlines()
    if line.strip().startswith("kdissect ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("help")
    console.prepare(made, "```console\n$ ls tables/ tables-java_2_0_1/\n```")
    (made / "before").symlink_to(made / "tables-java_2_0_1")
    (made / "after").symlink_to(made / "tables")
    for name in ("trace.pcap", "trace-1.pcap", "before.pcap", "after.pcap"):
        (made / name).symlink_to(console.ROOT / "captures" / "librdkafka.pcap")
    (made / "slow.sql").write_text("from exchanges where latency_ms > 100")
    return made


def test_there_are_examples() -> None:
    """Each of these verbs shows some."""
    assert {line.split()[1] for line in EXAMPLES} == {"sql", "readiness", "diff"}


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example(line: str, folder: Path) -> None:
    """It does what it says: 0, or 1 where it was asked to fail on something."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=console.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in ((0, 1) if "--fail-on" in line else (0,)), done.stderr
    assert done.stderr == ""
    for name in re.findall(r"(?:--out|>) (\S+)", line):
        assert (folder / name).stat().st_size
