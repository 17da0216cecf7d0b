"""What the documents show runs, and every verb is documented."""

import re
import shlex
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest
import typer
from typer.testing import CliRunner

import kdissect
from kdissect.cli import app
from kdissect.kafka.assembly import Anomaly
from kdissect.tables.anomalies import severity_of
from tests.conftest import ROOT
from tools import table_reference

README = (ROOT / "README.md").read_text()
SHARED_OPTIONS = [("summary.md", "captures-instead-of-table-sets"), ("show.md", "what-to-show")]
SQL_PAGE = (ROOT / "docs" / "sql.md").read_text()


@pytest.fixture
def crowded(table_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The set in the working folder, with files of another run: whole ones, and one that is cut."""
    shutil.copytree(table_set, tmp_path / "tables")
    for path in list((tmp_path / "tables").rglob("*.parquet")):
        shutil.copy(path, path.with_name("part-99999-0123456789ab.parquet"))
    (tmp_path / "tables" / "exchanges" / "part-00000-ba9876543210.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_macro_sees_the_manifests_files(crowded: Path) -> None:
    """docs/sql.md, in a DuckDB that knows nothing of us; a set that was replaced is an error."""
    (block,) = re.findall(r"```sql\n(.*?)```", SQL_PAGE, re.DOTALL)
    known = kdissect.open(crowded / "tables")
    with duckdb.connect() as connection:
        statements = connection.extract_statements(block)
        answers = [connection.execute(each).fetchall() for each in statements]
        assert len(answers[-2]) == len(
            known.sql("select distinct client_id, api_name from exchanges")
        )
        assert sum(count for _, count in answers[-1]) == len(known.api("Produce"))
        for name in known.names:
            (count,) = connection.execute(f"select count(*) from kdissect('{name}')").fetchone()
            assert count == len(known[name]), name
        known.write(crowded / "other")
        shutil.rmtree(crowded / "tables")
        (crowded / "other").rename(crowded / "tables")
        with pytest.raises(duckdb.IOException, match="No files found"):
            connection.execute("from kdissect('exchanges')")
        connection.execute(statements[0])
        assert len(connection.execute("from kdissect('exchanges')").fetchall()) == 319


def test_no_page_reads_a_set_by_its_folders() -> None:
    """`tables/NAME/*.parquet`, or all files of the folder, may be those of another run."""
    for page in pages():
        for block in re.findall(r"```.*?```", page.read_text(), re.DOTALL):
            assert not re.search(r"tables\S*/\*+\.parquet|parquet\(f?[\"']tables", block), page.name


def test_the_table_reference_is_what_the_schemas_say() -> None:
    """docs/reference.md has every column, with words for it."""
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == table_reference.reference()


def test_every_kind_of_anomaly_is_listed() -> None:
    """docs/tables.md explains each value of anomalies.kind, with its severity."""
    text = (ROOT / "docs" / "tables.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, 0-9]+) \| (info|warning|error) \|", text, re.MULTILINE)
    listed = {
        kind: severity for kinds, severity in rows for kind in re.findall("[a-z_0-9]+", kinds)
    }
    assert listed == {kind.name.lower(): severity_of(kind) for kind in Anomaly}


def pages() -> list[Path]:
    """Documents that people read."""
    return [
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        ROOT / "captures" / "README.md",
        *sorted((ROOT / "reports").glob("*.md")),
    ]


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page: its headings, as repository browsers write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the project, and to headings that they have."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pages_and_notebooks_are_linked_from_the_readme() -> None:
    """A page that nothing leads to is not read."""
    links = set(re.findall(r"\]\((\S+?)\)", README))
    for page in (*pages(), *sorted((ROOT / "notebooks").glob("*.ipynb"))):
        name = str(page.relative_to(ROOT))
        assert name in links or name == "README.md", name


@pytest.mark.parametrize("verb", [command.name for command in app.registered_commands])
def test_every_verb_has_a_page(verb: str) -> None:
    """Named after it, with a call of it; and the README has one, else it would not be found."""
    for text in (README, (ROOT / "docs" / f"{verb}.md").read_text()):
        assert f"kdissect {verb}" in text


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_documents_are_of_the_project(page: Path) -> None:
    """They name no place of the machine that they were written on."""
    found = re.findall(r"(?<![\w.:/-])/(?:work|root|home)/\S+|\.venv/lib\S*", page.read_text())
    assert not found


@pytest.mark.parametrize("page", ["architecture.md", "replay-design.md"])
def test_files_of_the_design_exist(page: str) -> None:
    """Each file and folder that a page names, and each name in the file that stands beside it."""
    text = (ROOT / "docs" / page).read_text()
    homes = [ROOT, ROOT / "docs", *(ROOT / "kdissect").glob("**/")]
    a_file = r"`((?:[\w*-]+/)*[\w*-]+(?:\.(?:py|toml|md)|/))"
    files = set(re.findall(a_file, text))
    assert len(files) > 20
    assert [file for file in files if not any(any(home.glob(file)) for home in homes)] == []
    for names, file in re.findall(r"^\| (`[A-Z].*?) \| `(\w+/\w+\.py)` \|", text, re.MULTILINE):
        code = next(path for home in homes for path in home.glob(file)).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class )?{name}\b", code, re.MULTILINE), (name, file)
    places = text.partition("## Where a thing is decided")[2].partition("## Kernels")[0]
    for row in re.findall(r"^\| .* \| (.*) \|$", places, re.MULTILINE):
        found = [
            path for file in re.findall(a_file, row) for home in homes for path in home.glob(file)
        ]
        code = [one for path in found for one in ([path] if path.is_file() else path.glob("*.*"))]
        words = {word for path in code for word in re.findall(r"\w+", path.read_text())}
        assert set(re.findall(r"`(\w+)`", row)) <= words, row


def test_packages_stand_in_the_order_of_their_imports() -> None:
    """In architecture.md as in the contract: a package imports only what is below it."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = document["tool"]["importlinter"]["contracts"][0]["layers"]
    height = {
        name: number
        for number, layer in enumerate(layers)
        for name in re.findall(r"kdissect\.(\w+)", layer)
    }
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Packages")[2]
    rows = re.findall(r"^\| `(.*?)` \|", text.partition("## Types")[0], re.MULTILINE)
    heights = [[height[name] for name in re.findall(r"\w+", row) if name in height] for row in rows]
    assert len(heights) > 12
    assert all(max(above) <= min(below) for above, below in pairwise(heights))


def test_every_dependency_has_a_reason() -> None:
    """In CONTRIBUTING.md, and no other has."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = document["project"], document["dependency-groups"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), groups["dev"]]
    needed = {re.split(r"[\[<>=~ ]", item)[0] for items in lists for item in items}
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    reasons = {
        name.strip(): why
        for names, why in rows[1:]
        for name in names.replace("(development)", "").split(",")
    }
    assert reasons.keys() == needed
    assert all(len(why) > 10 for why in reasons.values())


def test_questions_of_the_readme_have_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the README runs on a shipped capture; without a broker replay only plans."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.pcap").symlink_to(ROOT / "captures" / "librdkafka.pcap")
    blocks = README.partition("## Four questions")[2].split("```")[1:4:2]
    commands = [line for block in blocks for line in block.splitlines() if line]
    verbs = [line.split()[1] for line in commands]
    assert verbs == ["incidents", "report", "readiness", "replay", "sql"]
    for command in commands:
        command = command.replace("candidate:9092", "localhost:1 --dry-run")
        program, *arguments = shlex.split(command, comments=True)
        assert program == "kdissect"
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output.strip()


def test_the_python_page_has_every_public_name() -> None:
    """Their docstrings are on the page `docs/python.md` of the site."""
    listed = re.findall(r"^::: kdissect\.(\w+)$", (ROOT / "docs" / "python.md").read_text(), re.M)
    assert sorted([*listed, "__version__"]) == sorted(kdissect.__all__)


def test_the_examples_of_the_python_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block after those before it, in a folder with the shipped captures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captures").symlink_to(ROOT / "captures")
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["message"].api_name == "ApiVersions"
    assert (tmp_path / "orders.html").is_file()


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.name)
def test_the_page_of_a_verb_has_its_options(command: typer.models.CommandInfo) -> None:
    """Each of them by its long name; other spellings and opposites need not be there.

    Options that verbs share may be in a section that the page links to. Troubleshooting has
    `--debug`, which every verb has.
    """
    page = (ROOT / "docs" / f"{command.name}.md").read_text()
    page += (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Your symptom")[2]
    for name, section in SHARED_OPTIONS:
        if f"({name}#{section})" in page:
            page += (ROOT / "docs" / name).read_text()
    group = typer.main.get_command(app)
    options = [
        names
        for parameter in group.commands[command.name].params
        if (names := [name for name in parameter.opts if name.startswith("--")])
    ]
    assert options
    missing = [
        names
        for names in options
        if not any(re.search(rf"(?<![\w-])--(no-)?{name[2:]}\b", page) for name in names)
    ]
    assert not missing
