"""The documentation site: MkDocs builds it, and its pages need no other host."""

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import run

EXTERNAL_RESOURCE = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["'](?:https?:)?//|<link[^>]*\shref=["'](?:https?:)?//"""
    r"""|@import|url\(\s*["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning as an error: a broken link fails here."""
    out = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "--site-dir", out)
    done = run(sys.executable, "-m", "mkdocs", "build", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_on_the_site(site: Path) -> None:
    """A page that is not in the navigation of `mkdocs.yml` is not found."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    in_navigation = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    pages = {
        str(page.relative_to(ROOT))
        for pattern in ("*.md", "docs/*.md", "reports/*.md", "captures/*.md")
        for page in ROOT.glob(pattern)
    }
    assert in_navigation == pages
    for page in in_navigation - {"README.md"}:
        built = re.sub(r"README\.md$", "index.md", page).removesuffix(".md")
        assert (site / f"{built}.html").exists(), page
    assert (site / "index.html").exists()


def test_the_site_fetches_nothing_from_other_hosts(site: Path) -> None:
    """No script, style, font or picture comes from elsewhere."""
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        found = EXTERNAL_RESOURCE.search(file.read_text("utf-8"))
        assert not found, f"{file.relative_to(site)}: {found and found[0]}"
