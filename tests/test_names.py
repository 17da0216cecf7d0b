"""A class name stands for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.conftest import ROOT


def test_class_names_have_one_meaning() -> None:
    modules = defaultdict(list)
    for path in sorted((ROOT / "kdissect").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert not shared
