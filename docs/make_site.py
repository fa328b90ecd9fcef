"""Builds the site of all pages: `make docs`. They lie in it as in the repository, so that links work in both.

Every link and anchor is checked; one that leads nowhere is an error.
"""

import os
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "benchmarks/README.md")
FOLDERS = ("cluster", "docs", "recipes")


def build(folder: Path) -> Path:
    """The site in `folder`/site, from the pages in `folder`/pages, both made anew. Raises mkdocs' `Abort`."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # an advertisement
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(pages, ignore_errors=True)
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, pages / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in FILES:
        (pages / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, pages / name)
    config = load_config(str(REPOSITORY / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(site), strict=True)
    build_site(config)
    return site


if __name__ == "__main__":
    from mkdocs.exceptions import Abort

    try:
        print(f"open {build(REPOSITORY / 'build') / 'index.html'}")
    except Abort as error:
        sys.exit(str(error))
