"""What rows of results say, in sentences: ours beside the best peer, and training on files beside synthetic images."""

from __future__ import annotations

from collections.abc import Sequence

from vitral.bench.contestants import OURS
from vitral.bench.results import Row, best_peer, shown

_PERCENTILES = ("p50 ms", "p95 ms", "p99 ms")


def remarks(rows: Sequence[Row]) -> list[str]:
    """One sentence for each race that has a peer, by the fastest row of each side, and one for each loader."""
    return [*_compared(rows), *(_fed(row) for row in rows if "of synthetic speed" in row.details)]


def _compared(rows: Sequence[Row]) -> list[str]:
    found = []
    for race in dict.fromkeys(row.race for row in rows if row.library == OURS):
        ours = min((row for row in rows if row.race == race and row.library == OURS), key=lambda row: row.seconds)
        peer = best_peer(ours, rows)
        if peer is not None:
            found.append(_beside(ours, peer))
    return found


def _beside(ours: Row, peer: Row) -> str:
    said = [f"{_what(ours)}: {ours.label} is {peer.seconds / ours.seconds:.2f} times as fast as {peer.label}"]
    if ours.peak_bytes and peer.peak_bytes and ours.work != "data":  # most of a loader's is in its workers
        said.append(f"with {ours.peak_bytes / peer.peak_bytes:.2f} times its peak memory")
    if all(name in ours.details and name in peer.details for name in _PERCENTILES):
        both = (f"{name[:3]} {ours.details[name]:.2f} against {peer.details[name]:.2f}" for name in _PERCENTILES)
        said.append(f"{', '.join(both)} ms")
    if ours.call != peer.call:
        said.append("measured in different calls")
    return ", ".join(said) + "."


def _fed(row: Row) -> str:
    told = row.details
    return (
        f"{_what(row)}: with {row.label}, training from files runs at {told['of synthetic speed']:.0%} of the speed on "
        f"synthetic images ({shown(told['from files/s'])} and {shown(told['synthetic/s'])} images/s), waiting "
        f"{told['share waiting']:.0%} of the time; {told['workers beside the model']:.0f} workers beside the model, "
        f"{told['workers']:.0f} where the loader is alone."
    )


def _what(row: Row) -> str:
    return f"{row.task}, {row.model}, batch {row.batch}"
