"""The table for people."""

from __future__ import annotations

import io
import re

import pytest

from cosched.core.request import Slo
from cosched.lab.metrics.summary import summarize
from cosched.lab.metrics.table import print_table
from tests.lab.metrics.samples import OFFLINE, request

SLO = Slo(ttft_s=1.0, tpot_s=0.5)


def summaries():
    alone = request(0.0, (0.5, 0.75), slo=SLO, num_cached_tokens=25)
    slowed = request(0.0, (2.0, 2.25), slo=SLO, num_cached_tokens=25)
    offline = request(0.0, (1.0, 2.0), request_class=OFFLINE, num_recomputed_tokens=1234)
    return {
        "s0": summarize([alone]),
        "cosched": summarize([slowed, offline]),
    }


def printed() -> list[str]:
    file = io.StringIO()
    print_table(summaries(), file=file)
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def cells(line: str) -> list[str]:
    return line.split()[1:]


def test_one_row_per_setting_uncut():
    lines = printed()
    assert len(lines) == 5
    assert "…" not in "".join(lines)
    online = ["100.0", "100.0", "100.0", "0.50", "0.50", "-", "250.0", "250.0", "250.0"]
    assert cells(lines[3]) == [*online, *"---", "0", "0.00", "25.0", "0", "0"]
    online = ["0.0", "100.0", "0.0", "2.00", "2.00", "2.00", "250.0", "250.0", "250.0"]
    job = ["2.0", "2.0", "2.0", "45", "0.44", "25.0", "0", "1,234"]
    assert cells(lines[4]) == [*online, *job]
    assert "evicted" not in " ".join(lines), "a column without values is left out"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_terminal_gets_the_most_important_columns_that_fit(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    names = {"s0": "s0", "cosched": "hygen-throttled, chunks of 448, 1.9 req/s"}
    file = Terminal()
    print_table({names[name]: one for name, one in summaries().items()}, file=file)
    text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text and "both" in text
    [row] = [line for line in lines if line.split()[:1] == ["s0"]]
    assert f"{len(cells(row))} of 17 columns; --json FILE" in " ".join(text.split())


def test_a_row_for_each_tier():
    met = request(0.0, (0.5, 0.75), slo=SLO, priority=10)
    missed = request(0.0, (2.0, 2.25), slo=SLO, priority=0)
    file = io.StringIO()
    print_table({"live": summarize([met, missed])}, file=file)
    lines = [line.split() for line in file.getvalue().splitlines() if line.strip()]
    assert [line[:4] for line in lines[-3:]] == [
        ["live", "50.0", "100.0", "50.0"],
        ["tier", "10", "100.0", "100.0"],
        ["tier", "0", "0.0", "100.0"],
    ]
    assert lines[-1][-2:] == ["-", "-"], "preemptions are not told by tier"
