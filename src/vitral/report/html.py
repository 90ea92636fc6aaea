"""The frame of a self-contained HTML page, and the parts that all pages are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from vitral.data.images import UnreadableImage
from vitral.version import __version__

_LISTED = 200  # files that were left out and are listed by name


class Section(NamedTuple):
    """A part of a page with its heading and an introduction for first-time readers."""

    name: str  # a word: the link in the page's head, and its target
    title: str
    about: str  # HTML
    body: str  # HTML


class PageKind(NamedTuple):
    """What differs between kinds of pages, besides their contents."""

    script: str  # JavaScript, after the one of all pages
    style: str = ""  # CSS, likewise
    policy: str = "img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # all that it may load
    footer: str = "This file is self-contained: it loads nothing and sends nothing."


def page(
    title: str, lead: str, sections: Sequence[Section], data: Mapping[str, Any], kind: PageKind | None = None
) -> str:
    """Write an HTML file that loads nothing from elsewhere: `lead` is HTML below the heading, `data` what the script
    reads."""
    kind = kind or PageKind(_resource("page.js"))
    links = "".join(f'<a href="#{section.name}">{section.name.capitalize()}</a>' for section in sections)
    body = "".join(_section(section) for section in sections)
    html = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {kind.policy}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_resource("page.css")}{kind.style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<div class="bar">{_logo()}<span class="brand">vitral</span><nav class="scroll" aria-label="Sections">{links}</nav>
<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>
<h1>{escape(title)}</h1>
{lead}
</header>
<main id="main">
{body}</main>
<footer>Made by vitral {__version__}. {kind.footer}</footer>
<script type="application/json" id="data">{_embedded(data)}</script>
<script>
{_resource("frame.js")}{kind.script}</script>
</body>
</html>
"""
    # File names need not be valid UTF-8, but the page must be.
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", html)


def fact_table(rows: Mapping[str, str]) -> str:
    """A table of names and values; empty values are left out."""
    cells = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows.items() if value
    )
    return f'<table class="facts">{"".join(cells)}</table>'


def table(kind: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; `kind` is its class in the style sheet."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def scroller(body: str, label: str, tall: bool = False) -> str:
    """HTML that may be wider than the page, or with `tall` higher than the window, and then scrolls by itself."""
    kind = "scroll tall" if tall else "scroll"
    return f'<div class="{kind}" tabindex="0" role="group" aria-label="{escape(label)}">{body}</div>'


def left_out_section(images: Sequence[UnreadableImage]) -> list[Section]:
    """The files that could not be read, each with the reason, as a section; none if there is none."""
    if not images:
        return []
    listed = table("left-out", ["file", "reason"], [(image.path, image.reason) for image in images[:_LISTED]])
    more = f'<p class="hint">And {len(images) - _LISTED:,} more.</p>' if len(images) > _LISTED else ""
    about = f"{_counted(len(images))} could not be read, and no number on this page includes them."
    return [Section("unreadable", "Files left out", about, scroller(listed, "Files left out", tall=True) + more)]


def headline_numbers(numbers: Mapping[str, str]) -> str:
    """A few numbers in large type; empty ones are left out."""
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items() if value)
    return f'<dl class="numbers">{"".join(cells)}</dl>'


def panels(*charts: tuple[str, str]) -> str:
    """Captions with their charts, side by side as far as they fit."""
    parts = (f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>" for name, chart in charts)
    return f'<div class="panels">{"".join(parts)}</div>'


def _counted(images: int) -> str:
    return "1 file" if images == 1 else f"{images:,} files"


def _section(section: Section) -> str:
    about = f'<p class="about">{section.about}</p>' if section.about else ""
    head = f'<h2 id="{section.name}-title">{escape(section.title)}</h2>{about}'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">{head}{section.body}</section>\n'


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot close the script element around it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("vitral.report").joinpath(name).read_text("utf-8")


def _logo() -> str:
    """A stained-glass window of four by four panes."""
    panes = "bcyrcbryyrbcrycb"
    colours = {"b": "#2f5fb3", "c": "#2a9d8f", "y": "#e9b44c", "r": "#c8553d"}
    cells = (
        f'<rect x="{i % 4 * 7}" y="{i // 4 * 7}" width="6" height="6" rx="1" fill="{colours[letter]}"/>'
        for i, letter in enumerate(panes)
    )
    return f'<svg class="glass" viewBox="0 0 27 27" aria-hidden="true">{"".join(cells)}</svg>'
