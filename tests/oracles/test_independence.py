"""An oracle decides by itself: a wrong constant of the product must not pass both."""

import ast
from pathlib import Path

# Marks in the rows that an oracle and the product compare; they decide nothing.
ALLOWED = {
    "kdissect.capture.segments": {"FRAGMENT_PART", "NO_HEADER"},
    "kdissect.status": {"Status"},
}


def test_oracles_take_nothing_from_the_product() -> None:
    """No module of this folder imports a rule, table or number of kdissect."""
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("kdissect") for name in node.names), path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kdissect"):
                names = {name.name for name in node.names}
                assert names <= ALLOWED.get(node.module or "", set()), (path, names)
