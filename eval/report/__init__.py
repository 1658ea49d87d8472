"""The report: run folders in, one HTML file and one Markdown file out.

`find_runs` and `gather` make the evidence, `write_report` says it. Formulas are in `metrics`,
`stats` and `compare`; here is what is said, in which order, and what is held back: runs that broke
a rule are named and left out, and no verdict is given that the data does not carry.
"""

from __future__ import annotations

from eval.report.evidence import Evidence, find_runs, gather
from eval.report.export import summary_json, tables, write_csv, write_parquet
from eval.report.facts import caption, engine_entry, place, title
from eval.report.searches import Search, find_searches
from eval.report.write import write_report

__all__ = [
    "Evidence",
    "Search",
    "caption",
    "engine_entry",
    "find_runs",
    "find_searches",
    "gather",
    "place",
    "summary_json",
    "tables",
    "title",
    "write_csv",
    "write_parquet",
    "write_report",
]
