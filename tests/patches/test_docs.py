"""``docs/sglang_seams.md`` is current."""

from cosched_patches.docs import PATH, render
from tests.serving import ROOT


def test_page_is_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == render(), "run: python -m cosched_patches.docs --write"
