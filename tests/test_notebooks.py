"""Every notebook runs from clean, top to bottom, on captures that ship with the project."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.cases import cases
from tests.conftest import ROOT
from tools.run_notebooks import run

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# the others run in Jupyter among the heavy tests
IN_JUPYTER = [path for path in NOTEBOOKS if path.stem == "which_client_is_slow"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_in_an_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the root, its cells run in order in one namespace, and leave a sentence in `answer`."""
    monkeypatch.chdir(ROOT)
    cells = json.loads(path.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert len(names["answer"]) > 20
    print(f"{path.stem}: {names['answer']}")


@cases(
    "path",
    IN_JUPYTER,
    heavy=[path for path in NOTEBOOKS if path not in IN_JUPYTER],
    ids=lambda path: path.stem,
)
def test_a_notebook_shows_what_it_has_stored(path: Path) -> None:
    """In Jupyter, from its own folder: the stored outputs, and charts that need no network."""
    stored, fresh = nbformat.read(path, as_version=4), run(path)
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        assert _texts(before) == _texts(after)
    charts = [output.data for cell in fresh.cells for output in cell.get("outputs", ())
              if "image/svg+xml" in output.get("data", {})]  # fmt: skip
    assert charts or path.stem == "ready_for_kafka_4"
    for cell in stored.cells:
        assert "https://cdn" not in json.dumps(cell.get("outputs", ()))


def _texts(cell: Any) -> list[Any]:
    return [
        output.get("text") or output.get("data", {}).get("text/plain")
        for output in cell.get("outputs", ())
    ]
