"""``docs/sglang_seams.md`` is current."""

from __future__ import annotations

from cosched_patches.docs import PATH, main, render
from cosched_patches.seams import SEAMS
from tests.serving import ROOT


def test_page_is_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == render(SEAMS), "run: python -m cosched_patches.docs --write"


def test_page_names_everything():
    page = render(SEAMS)
    for seam in SEAMS:
        assert f"`{seam.target}`" in page
        assert f"## {seam.hook.__module__.rpartition('.')[2]}\n" in page


def test_command(capsys, monkeypatch, tmp_path):
    main([])
    assert capsys.readouterr().out == render(SEAMS)
    (tmp_path / PATH.parent).mkdir()
    monkeypatch.chdir(tmp_path)
    main(["--write"])
    assert (tmp_path / PATH).read_text(encoding="utf-8") == render(SEAMS)
