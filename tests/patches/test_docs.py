"""``docs/sglang_seams.md`` is current."""

from __future__ import annotations

from cosched_patches.docs import PATH, render
from cosched_patches.seams import SEAMS
from tests.serving import ROOT


def test_page_is_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == render(), "run: python -m cosched_patches.docs --write"


def test_page_names_every_hook_and_what_its_place_takes():
    page = render()
    for seam in SEAMS:
        assert f"`{seam.target.removeprefix('sglang.srt.')}({seam.parameters})`" in page
        assert f"{seam.kind} `{seam.hook.__name__}`" in page
