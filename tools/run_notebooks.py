"""Run the notebooks in their folder and store their outputs in them.

python -m tools.run_notebooks
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run(path: Path, folder: Path = NOTEBOOKS) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, run where Jupyter starts it: in its folder."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # times of day
    return notebook


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(run(path), path)


if __name__ == "__main__":
    main()
