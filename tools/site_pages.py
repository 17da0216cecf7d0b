"""The pages of the documentation site, as a hook of MkDocs (`mkdocs.yml`).

The site has the layout of the project: `docs/`, `reports/` and the pages beside them keep their
paths, so that a link works on the site as it does in the repository. README.md is the first page.
The page of the command line is made from the help texts.
Files that pages link to and that are no pages (notebooks, examples, pictures) are copied.
"""

from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from kdissect.cli import app

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/*.md", "reports/*.md", "captures/*.md")
LINKED = ("docs/site.css", "docs/images/*", "notebooks/*.ipynb", "examples/ci/*", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages and linked files under their paths in the project, with the files of the theme."""
    theme = [file for file in files if file.src_uri not in _under_docs(config)]
    own = [
        File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path))
        for pattern in (*PAGES, *LINKED)
        for path in sorted(ROOT.glob(pattern))
    ]
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="kdissect")
    verbs = get_docs_for_click(obj=command, ctx=context, name="kdissect", title="Command line")
    return Files([*theme, *own, File.generated(config, "docs/cli.md", content=verbs)])


def _under_docs(config: MkDocsConfig) -> set[str]:
    """Paths that MkDocs gave the files of `docs/`: relative to that folder."""
    folder = Path(config.docs_dir)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
