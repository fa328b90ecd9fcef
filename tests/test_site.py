"""The pages as a site: every page is in it, and every link and anchor leads somewhere."""

import importlib.util
import shutil

import pytest
from documented_commands import PAGES, REPOSITORY

pytest.importorskip("mkdocs", reason="the site needs mkdocs-material: make setup-tests")


@pytest.fixture
def site():
    """docs/make_site.py, which is no package's."""
    found = importlib.util.spec_from_file_location("site_of_pages", REPOSITORY / "docs" / "make_site.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_all_pages_are_in_it_and_all_links_lead_somewhere(site, tmp_path):
    built = site.build(tmp_path)
    pages = {built / page.relative_to(REPOSITORY).with_suffix(".html") for page in PAGES}
    in_it = {page if page.stem != "README" else page.with_name("index.html") for page in pages}
    assert not [str(page) for page in in_it if not page.is_file()]
    shown = (built / "index.html").read_text(encoding="utf-8")
    assert "docs/architecture.html" in shown and 'src="http' not in shown


def test_links_that_lead_nowhere_are_errors(site, tmp_path, monkeypatch):
    from mkdocs.exceptions import Abort

    copy = tmp_path / "repository"
    for part in (*site.FILES, *site.FOLDERS, "mkdocs.yml"):
        source, target = REPOSITORY / part, copy / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    monkeypatch.setattr(site, "REPOSITORY", copy)
    with (copy / "docs" / "report.md").open("a") as page:
        page.write("\n[a page](nowhere.md) [an anchor](recipe.md#nowhere) [a file](../vitscale/nowhere.py)\n")
    with pytest.raises(Abort, match="3 warnings"):
        site.build(tmp_path / "build")
