"""Every page is in the index, and no link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def links_of(page):
    """(path, anchor) of what a page links to within the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors_of(page):
    """Of its headings, as GitHub names them."""
    for heading in re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), flags=re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        yield plain.replace(" ", "-")


def test_the_index_has_one_line_for_each_page():
    index = DOCS / "README.md"
    rows = [line for line in index.read_text().splitlines() if line.startswith("| [")]
    named = [path for path, _ in links_of(index)]
    assert sorted(path for path in named if path.is_relative_to(DOCS)) == [
        page for page in PAGES if page != index
    ]
    assert len(rows) == len(named)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for path, anchor in links_of(page):
        assert path.exists(), f"{page.name} links to {path}"
        if anchor and path.suffix == ".md":
            assert anchor in set(anchors_of(path)), f"{page.name} links to {path.name}#{anchor}"


def test_files_that_code_and_commands_name_are_there():
    sources = [
        path
        for folder in ("cosched", "patches", "traces", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    for source in sources:
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", source.read_text(errors="ignore")):
            assert (ROOT / name).is_file(), f"{source.relative_to(ROOT)} names {name}"


def test_every_folder_of_code_has_a_line_in_the_architecture():
    rows = re.findall(r"^\| `([\w/]+)/` \|", (DOCS / "architecture.md").read_text(), flags=re.M)
    assert [row for row in rows if not (ROOT / row).is_dir()] == []
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for root in ("cosched", "kernels", "patches", "traces", "examples", "scripts")
        for path in (ROOT / root).rglob("*.py")
    }
    assert folders - {"cosched"} <= set(rows)


def test_the_parts_of_the_papers_are_where_their_page_says():
    rows = [
        line for line in (DOCS / "results" / "papers.md").read_text().splitlines() if "`" in line
    ]
    num_names = 0
    for row in rows:
        path = None
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith(".py"):
                path = ROOT / word
                assert path.is_file(), word
            elif path is not None and re.fullmatch(r"[A-Z]\w+", word):
                assert f"class {word}" in path.read_text(), f"{word} in {path}"
                num_names += 1
    assert num_names > 5
