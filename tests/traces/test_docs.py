"""The tables of ``docs/workloads.md`` are current."""

import pytest

from cosched_traces.docs import PATH, with_tables
from tests.traces.conftest import ROOT


def test_the_tables_are_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m cosched_traces.docs"


def test_a_missing_mark_is_named():
    with pytest.raises(ValueError, match="<!-- workloads -->"):
        with_tables("# Workloads\n")
