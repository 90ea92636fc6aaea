"""Report on all studies in results/, and write their claims and reports into docs/studies.md.

python benchmarks/studies_page.py             # the page, and the tables in results/
python benchmarks/studies_page.py --figures   # also results/*/figure.png, with Chromium
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from html import escape
from pathlib import Path

from PIL import Image, ImageChops

import vitral
from vitral.api.study import StudyRuns
from vitral.report.html import Section, page, panels
from vitral.studies.definition import shipped
from vitral.studies.report import figures

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "studies.md"
_MARGIN = 24  # pixels around a figure
_BARE = "<style>header, footer { display: none }</style>"


def updated(text: str, results: Path) -> str:
    """The page with the claims and the reports of a folder of studies between its marks."""
    report = vitral.study("report", results)
    assert isinstance(report, vitral.StudyReport)
    links = [_link(state) for state in report.studies]
    missing = sorted(set(shipped()) - {state.study.name for state in report.studies})
    links += ["\n", f"Not run yet: {', '.join(missing)}.\n"] if missing else []
    parts = {"claims": (results / "claims.md").read_text("utf-8"), "reports": "".join(links)}
    for name, part in parts.items():
        mark = f"<!-- {name} -->\n"
        text = re.sub(f"{mark}.*?<!-- end -->", lambda _, new=f"{mark}{part}<!-- end -->": new, text, flags=re.DOTALL)
    return text


def _link(state: StudyRuns) -> str:
    """A line of the list of reports."""
    folder, current = f"../results/{state.folder.name}", state.plan
    done = current.total - len(current.pending) - current.waiting
    part = f", {done} of {current.total} runs so far" if done < current.total else ""
    return f"- [{state.study.title}]({folder}/report.md) ({state.study.source}), [figure]({folder}/figure.png){part}\n"


def draw(results: Path) -> None:
    """Write the figure of every study's page as a PNG file into its folder."""
    report = vitral.study("report", results)
    assert isinstance(report, vitral.StudyReport)
    with tempfile.TemporaryDirectory() as scratch:
        for state in report.studies:
            section = Section(
                "figure", state.study.title, escape(state.study.about), panels(*figures(state.study, state.cells))
            )
            source, shot = Path(scratch, "figure.html"), Path(scratch, "figure.png")
            html = page(state.study.title, "", [section], {}).replace("</head>", f"{_BARE}</head>")
            source.write_text(html, "utf-8")
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1600"]
            command = ["chromium", *options, f"--user-data-dir={scratch}/profile", f"--screenshot={shot}", str(source)]
            subprocess.run(command, check=True, capture_output=True)
            _cropped(Image.open(shot).convert("RGB")).save(state.folder / "figure.png", optimize=True)


def _cropped(picture: Image.Image) -> Image.Image:
    """The picture without most of the empty page around it."""
    background = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, background).getbbox()
    assert box is not None
    return picture.crop((0, max(box[1] - _MARGIN, 0), picture.width, box[3] + _MARGIN))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="draw the figures, too")
    if parser.parse_args().figures:
        draw(ROOT / "results")
    PAGE.write_text(updated(PAGE.read_text("utf-8"), ROOT / "results"), "utf-8")
