"""Specifications of charts as files: whole, with all their parameters, drawn by the report too."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kdissect import charts

FILES = sorted(
    file.name.removesuffix(".vl.json")
    for file in resources.files(charts).iterdir()
    if file.name.endswith(".vl.json")
)
VALUES: dict[str, Any] = {
    "slice_ms": 1000,
    "series": ["a", "b"],
    "colours": {"domain": ["a", "b"]},
    "bad": "#f00",
    "warn": "#ff0",
    "height": 100,
    "scale": "log",
    "x_scale": {"type": "log"},
    "x_label": "datum.label",
    "measure": "bytes",
    "format": "~s",
    "labels": {"a": "heading"},
}


def _parameters(name: str) -> dict[str, Any]:
    text = (resources.files(charts) / f"{name}.vl.json").read_text("utf-8")
    names = set(re.findall(r'"\$(\w+)"', text))
    return {key: VALUES.get(key, "a title") for key in names}


@pytest.mark.parametrize("name", FILES)
def test_a_specification_compiles_to_marks(name: str) -> None:
    """Each specification, with all its parameters, is valid Vega-Lite that draws marks."""
    vl_convert = pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    spec = charts.load(name, **_parameters(name))
    assert "$" not in json.dumps(spec)
    vega = vl_convert.vegalite_to_vega({**spec, "width": 300}, vl_version=charts.VEGA_LITE)
    assert vega["marks"]


def test_a_missing_or_unknown_parameter_is_an_error() -> None:
    """A missing or an unknown parameter of a chart is an error with its name."""
    with pytest.raises(KeyError, match="height"):
        charts.load("ranges")
    with pytest.raises(TypeError, match="ranges has no parameter colour"):
        charts.load("ranges", height=1, colour=2)


def test_each_file_is_drawn() -> None:
    """Each specification is loaded by a chart, a section of the report or a plot."""
    package = Path(charts.__file__).parents[1]
    drawing = [charts.__file__, package / "plot.py", *package.glob("report/sections/*.py")]
    texts = "".join(Path(file).read_text("utf-8") for file in drawing)
    assert set(re.findall(r'load\(\s*"(\w+)"', texts)) == set(FILES)
