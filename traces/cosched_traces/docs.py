"""The tables in ``docs/simulation.md`` that are made from the code.

``python -m cosched_traces.docs``, run from the root of the repository, writes them into the page,
each between ``<!-- name -->`` and ``<!-- /name -->``. A test checks that they are current.
"""

from __future__ import annotations

from pathlib import Path

from cosched_traces.catalogue import workload_table
from cosched_traces.formats import format_table

PATH = Path("docs/simulation.md")

TABLES = {"workloads": workload_table, "formats": format_table}


def with_tables(page: str) -> str:
    """The page with new tables. Raises `ValueError` if a mark is missing."""
    for name, table in TABLES.items():
        opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = page.partition(opening)
        _, found, after = rest.partition(closing)
        if not found:
            raise ValueError(f"no {opening.strip()} … {closing.strip()} in the page")
        page = f"{before}{opening}{table()}{closing}{after}"
    return page


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text(encoding="utf-8")), encoding="utf-8")
