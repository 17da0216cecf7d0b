"""Every recipe of the cookbook runs, and its forms agree."""

import datetime
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.compute as pc
import pytest

import kdissect
from kdissect.sql import view_name
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "cookbook.md").read_text()
RECIPES = {
    part.split("\n", 1)[0]: dict(re.findall(r"```([\w-]+)\n(.*?)```", part, re.DOTALL))
    for part in PAGE.split("\n## ")[1:]
}
PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sql.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, table_set: Path) -> Path:
    return shutil.copytree(table_set, tmp_path_factory.mktemp("cookbook") / "tables")


def plain(value: Any) -> Any:
    """A value as all three engines can give it."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, pd.Timestamp | datetime.datetime):
        stamp = pd.Timestamp(value)
        stamp = stamp.tz_localize("UTC") if stamp.tzinfo is None else stamp.tz_convert("UTC")
        return stamp.isoformat()
    if isinstance(value, float):
        # halves may be rounded either way
        return None if value != value else pytest.approx(value, abs=0.0011)
    return value.item() if hasattr(value, "item") else value


def rows_of(frame: pd.DataFrame) -> list[list[Any]]:
    return [[plain(value) for value in row] for row in frame.astype(object).values.tolist()]


def duckdb_rows(query: str, tables: kdissect.Tables) -> list[list[Any]]:
    return [[plain(value) for value in row.values()] for row in tables.sql(query).to_pylist()]


def test_each_recipe_has_three_forms() -> None:
    """Every recipe has all three forms."""
    assert len(RECIPES) >= 12
    for name, forms in RECIPES.items():
        assert set(forms) == {"sql", "spark-sql", "pandas"}, name


@pytest.mark.parametrize("name", RECIPES)
def test_duckdb_and_pandas(name: str, tables: kdissect.Tables) -> None:
    """The same rows, in the same order."""
    wanted = duckdb_rows(RECIPES[name]["sql"], tables)
    scope = {"tables": tables, "pd": pd, "pc": pc}
    exec(RECIPES[name]["pandas"], scope)
    assert rows_of(scope["x"]) == wanted
    assert wanted


def test_spark_opens_the_manifests_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page gives Spark to read, by the name of the view."""
    tables = kdissect.open(folder)
    monkeypatch.chdir(folder.parent)
    shutil.copy(next((folder / "exchanges").iterdir()), folder / "exchanges" / "left.parquet")
    opened: dict[str, set[str]] = {}

    def parquet(*files: str) -> Any:
        return SimpleNamespace(
            createOrReplaceTempView=lambda view: opened.update({view: set(files)})
        )

    (block,) = re.findall(r"\*\*Spark\*\*.*?```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {"spark": SimpleNamespace(read=SimpleNamespace(parquet=parquet))})
    assert opened == {
        view_name(name): {os.path.relpath(file) for file in tables[name].dataset.files}
        for name in tables.names
    }


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_gives_the_rows_of_duckdb(tables: kdissect.Tables, folder: Path, spark: Any) -> None:
    """The same rows on Spark, from the files alone."""
    time_zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        asked = " ".join(forms["spark-sql"] for forms in RECIPES.values())
        used = [name for name in tables.names if re.search(rf"\b{view_name(name)}\b", asked)]
        for name in used:
            files = [str(folder / file) for file in tables.manifest["tables"][name]["files"]]
            spark.read.parquet(*files).createOrReplaceTempView(view_name(name))
        for name, forms in RECIPES.items():
            found = spark.sql(forms["spark-sql"]).toArrow().to_pylist()
            rows = [[plain(value) for value in row.values()] for row in found]
            assert rows == duckdb_rows(forms["sql"], tables), name
    finally:
        spark.conf.set("spark.sql.session.timeZone", time_zone)


def test_python_of_the_sql_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/sql.md shows in Python runs."""
    monkeypatch.chdir(ROOT)
    assert PYTHON
    for block in PYTHON:
        exec(block, {})
