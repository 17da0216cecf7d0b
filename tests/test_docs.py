"""What the documents show runs, and every verb is documented."""

import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

import kdissect
from kdissect.cli import app
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> Path:
    """The table set of a shipped capture, on disk."""
    out = tmp_path_factory.mktemp("docs") / "tables"
    kdissect.read(captures / "librdkafka.pcap").write(out)
    return out


@pytest.mark.parametrize("query", QUERIES)
def test_queries_of_the_readme_run(query: str, tables: Path) -> None:
    """DuckDB runs them over the files alone, and they find something."""
    rows = duckdb.sql(query.replace("'tables/", f"'{tables}/")).fetchall()
    assert rows


def test_every_verb_is_in_the_readme() -> None:
    """A command that is not shown there would not be found."""
    verbs = [command.name for command in app.registered_commands]
    assert verbs
    for verb in verbs:
        assert f"kdissect {verb}" in README


def test_the_two_commands_lead() -> None:
    """README shows make demo and make test before anything else."""
    first_block = README.split("```")[1]
    assert "make demo" in first_block
    assert "make test" in first_block


def test_the_table_reference_is_what_the_schemas_say() -> None:
    """docs/reference.md has every column, with words for it."""
    command = [sys.executable, "docs/make_reference.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
