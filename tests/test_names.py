"""A name of a class or a public constant stands for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.conftest import ROOT


@cache
def _package() -> dict[Path, ast.Module]:
    """The modules of the package by their path below the root."""
    paths = sorted((ROOT / "kdissect").rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in paths}


def test_class_names_have_one_meaning() -> None:
    """No two modules of the package define classes of one name."""
    modules = defaultdict(list)
    for path, module in _package().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path))
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert not shared


# Modules of numbers of columns: the tables of kernels. Readers meet their names with the module's.
COLUMN_MODULES = {
    "frame_tables", "record_kernel", "column_kernel", "packet_reader", "ip_fragments",
    "link_layers", "columns", "plaintext_ranges", "records", "column_plan", "frame_search",
}  # fmt: skip
# Names of two meanings that stay, with the reason.
TWO_MEANINGS = {
    "INFO": "a severity of anomalies, which is a number, and one of incidents, which is a text",
    "KINDS": "the changes that `diff` finds, and the incidents: `--fail-on` of each takes them",
    "NO_TIME": "the absent time of an event, and that of a kernel of TCP",
    "SEVERITIES": "those of anomalies, and those of incidents",
    "SEVERITY": "the anomalies' column in a kernel's table, and their severities in the schema's",
    "TRANSACTIONS": "the table, and what `--allow transactions` names",
    "UNKNOWN": "a verdict of readiness, and a number that TCP did not show",
    "UNKNOWN_TAGS": "a key of decoded messages, and the Arrow type of that column",
}


def test_public_constants_have_one_meaning() -> None:
    """No two modules define a public constant of one name, with listed exceptions."""
    modules = defaultdict(list)
    for path, module in _package().items():
        # a detector of incidents has thresholds of its own, of the same names
        if path.stem in COLUMN_MODULES or (
            path.parent.name == "incidents" and path.stem != "model"
        ):
            continue
        for node in module.body:
            targets = (
                node.targets if isinstance(node, ast.Assign)
                else [node.target] if isinstance(node, ast.AnnAssign) and node.value else []
            )  # fmt: skip
            for target in targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name) and name.id.isupper() and name.id[0] != "_":
                        modules[name.id].append(str(path))
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert not shared.keys() - TWO_MEANINGS.keys(), shared


# Words that name nothing of the field. They may stand for a value of a few lines.
VAGUE = {"found", "each", "known", "told", "asked", "came", "mine", "theirs", "it"}
LINES_MAX = 5
BLOCKS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _lives(function: ast.FunctionDef) -> dict[tuple[ast.AST, str], list[int]]:
    """(Block that binds a vague name, name) -> lines with the name."""
    lines = defaultdict(list)

    def visit(node: ast.AST, block_of: dict[str, ast.AST]) -> None:
        if isinstance(node, BLOCKS):
            targets = [node] if isinstance(node, ast.For) else node.generators
            names = [name for one in targets for name in ast.walk(one.target)]
            block_of = block_of | {name.id: node for name in names if isinstance(name, ast.Name)}
        name = getattr(node, "id", getattr(node, "arg", None))
        if name in VAGUE and isinstance(node, ast.Name | ast.arg):
            lines[block_of.get(name, function), name].append(node.lineno)
        for inner in ast.iter_child_nodes(node):
            if not isinstance(inner, ast.FunctionDef):  # it has variables of its own
                visit(inner, block_of)

    visit(function, {})
    return lines


def test_a_variable_of_many_lines_has_a_noun() -> None:
    """A vague name is used at most five lines after the line that binds it."""
    vague = [
        f"{path}:{lines[0]}: {name}"
        for path, module in _package().items()
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef)
        for (_, name), lines in _lives(function).items()
        if max(lines) - min(lines) > LINES_MAX
    ]
    assert not vague
