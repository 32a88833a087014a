"""The list of hooks in ``docs/porting.md`` is current."""

from cosched_patches.docs import PATH, with_hooks
from tests.serving import ROOT


def test_list_of_hooks_is_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == with_hooks(page), "run: python -m cosched_patches.docs"
