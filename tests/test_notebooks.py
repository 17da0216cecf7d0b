"""Every notebook runs from clean, top to bottom, on a capture that ships with the project."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_in_an_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order in one namespace, and leave a sentence in `answer`."""
    monkeypatch.chdir(ROOT)
    cells = json.loads(path.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert len(names["answer"]) > 20
    print(f"{path.stem}: {names['answer']}")
