"""Every page can be reached, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

from .examples import ROOT, name_of

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(path: Path) -> list[str]:
    """Return the relative links of a page, without what is inside of code."""
    text = _CODE.sub("", path.read_text(encoding="utf-8"))
    return [link for link in _LINK.findall(text) if not re.match(r"\w+:", link)]


def anchors(path: Path) -> set[str]:
    """Return the anchors that the headings of a page have."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_relative_link_leads_to_something_that_exists(path: Path):
    for link in links(path):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_can_be_reached_from_the_index():
    reached, waiting = set(), [ROOT / "docs" / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        folders = [target for target in targets if target.is_dir()]
        targets += [found for folder in folders for found in folder.glob("*.md")]
        new = {t for t in targets if t.suffix == ".md"} - reached - set(waiting)
        waiting += [target for target in new if target.exists()]
    missing = [name_of(page) for page in (ROOT / "docs").rglob("*.md") if page not in reached]
    assert not missing
