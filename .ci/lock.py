"""Rewrite the hashes in requirements.txt and requirements-cuda.txt for the versions that they pin.

Run `python .ci/lock.py` after changing a version there. Hashes are those that the index states (PIP_INDEX_URL, else
PyPI) for the wheels of the supported systems; source distributions are left out, so nothing is built on installation.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
# name-version[-build]-python-abi-platform.whl of CPython 3.11 to 3.14 on Linux and macOS, in any version of theirs
_WHEEL = re.compile(
    r"(?P<version>[^-]+)(?:-\d[^-]*)?-(?:[\w.]*py3[\w.]*-none|cp3\d+-abi3|cp3(?P<python>1[1-4])-(?:cp31[1-4]|none))-"
    r"(?:any|(?:manylinux|macosx)[\w.]*_(?:x86_64|aarch64|arm64|universal2))\.whl"
)
_LINK = re.compile(r'<a\s[^>]*href="[^"]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*</a>')


def hashes(name: str, version: str) -> list[str]:
    """The sha256 of every wheel of a release for the supported systems, sorted."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{INDEX}/{normal}/", timeout=120) as answer:
        links = _LINK.findall(answer.read().decode())
    found = set()
    for digest, file in links:
        wheel = _WHEEL.fullmatch(file.partition("-")[2])
        if wheel and wheel["version"] == version:
            found.add(digest)
    if not found:
        sys.exit(f"{INDEX} has no wheel of {name}=={version} for these systems: pin another version.")
    return sorted(found)


def lock(path: Path) -> None:
    """Rewrite one file; comments, versions and markers stay."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("    --hash"):
            continue
        pin = re.match(r"([\w.-]+)==([\w.]+)", line)
        lines.append(line.removesuffix(" \\"))
        if pin:
            lines[-1] += " \\"
            lines += [f"    --hash=sha256:{digest} \\" for digest in hashes(*pin.groups())]
            lines[-1] = lines[-1].removesuffix(" \\")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in ("requirements.txt", "requirements-cuda.txt"):
        lock(ROOT / name)
