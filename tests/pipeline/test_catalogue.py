"""Rows of table sets in the tables of a Spark catalogue; `catalogue_job` has the checks."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pyspark
import pytest

import kdissect
from kdissect.catalogue import _run_id, publish
from kdissect.errors import OutputError
from tests.processes import run

RELEASE = ".".join(pyspark.__version__.split(".")[:2])
REPOSITORY = Path.home() / ".m2" / "repository" / "org" / "apache" / "iceberg"


@pytest.fixture
def iceberg() -> str:
    """The jar of Iceberg for this Spark: KDISSECT_ICEBERG_JAR, or in Maven's local repository."""
    name = f"iceberg-spark-runtime-{RELEASE}_2.13"
    found = [*REPOSITORY.glob(f"{name}/*/{name}-*.jar")]
    jar = os.environ.get("KDISSECT_ICEBERG_JAR") or max(map(str, found), default="")
    if not jar:
        pytest.skip(f"no Iceberg for Spark {RELEASE} (mvn dependency:get, KDISSECT_ICEBERG_JAR)")
    return jar


@pytest.mark.heavy
@pytest.mark.spark
def test_iceberg_has_the_rows_of_read(iceberg: str, tmp_path: Path) -> None:
    """Two runs, the second with more columns; a run that is lost between two tables and repeated;
    runs that are repeated although they succeeded."""
    done = run(
        sys.executable, "-m", "tests.pipeline.catalogue_job", "iceberg", "lake", tmp_path,
        f"spark.jars={iceberg}",
        "spark.sql.catalog.lake=org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type=hadoop",
        f"spark.sql.catalog.lake.warehouse={tmp_path / 'warehouse'}",
        timeout_s=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.usefixtures("in_process")
def test_a_set_with_state_is_refused(captures: Path, tmp_path: Path) -> None:
    """A later append replaces some of its rows, which a catalogue would keep."""
    out = tmp_path / "out"
    no_session: Any = None
    kdissect.dissect(no_session, captures / "kafkajs.pcap.gz", out, keep_state=True)
    with pytest.raises(OutputError, match="has saved state"):
        publish(no_session, out, "lake.kafka")


def test_rows_that_are_there_are_not_read(captures: Path, tmp_path: Path) -> None:
    """A table that has the rows of the set costs one query, no look at the files."""
    out, session = tmp_path / "out", MagicMock()
    kdissect.read(captures / "kafkajs.pcap.gz").write(out)
    with patch("kdissect.catalogue.F"):
        assert publish(session, out, "lake.kafka") == []
    session.table.assert_any_call("lake.kafka.exchanges")
    session.read.option.assert_not_called()


def test_a_run_has_an_id_of_its_own_if_its_rows_may_differ(captures: Path, tmp_path: Path) -> None:
    """A key log with other secrets, or another version, makes another run; another name of the key
    log does not."""
    early, late, copied = (tmp_path / name for name in ("early.log", "late.log", "copied.log"))
    early.write_text("# no secrets yet\n")
    shutil.copy(captures / "tls13.keylog", late)
    shutil.copy(late, copied)
    capture = captures / "tls13.pcap.gz"
    manifests = [kdissect.read(capture, keylog=path).manifest for path in (early, late, copied)]
    of_early, of_late, of_copied = map(_run_id, manifests)
    assert of_early != of_late == of_copied
    assert _run_id(manifests[1] | {"program_version": "0.0"}) != of_late
