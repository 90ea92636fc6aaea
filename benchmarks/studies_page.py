"""Report on all studies in results/, and write their claims and reports into docs/studies.md.

python benchmarks/studies_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

import vitral
from vitral.studies.definition import shipped

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "studies.md"


def updated(text: str, results: Path) -> str:
    """The page with the claims and the reports of a folder of studies between its marks."""
    report = vitral.study("report", results)
    assert isinstance(report, vitral.StudyReport)
    studies = [(state.study, state.folder.name) for state in report.studies]
    links = [f"- [{study.title}](../results/{name}/report.md) ({study.source})\n" for study, name in studies]
    missing = sorted(set(shipped()) - {study.name for study, _ in studies})
    links += ["\n", f"Not run yet: {', '.join(missing)}.\n"] if missing else []
    parts = {"claims": (results / "claims.md").read_text("utf-8"), "reports": "".join(links)}
    for name, part in parts.items():
        mark = f"<!-- {name} -->\n"
        text = re.sub(f"{mark}.*?<!-- end -->", lambda _, new=f"{mark}{part}<!-- end -->": new, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8"), ROOT / "results"), "utf-8")
