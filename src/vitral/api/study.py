"""`study`: the paper's studies and your own, as tables of runs that resume where they stopped."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitral.api.data import check_folder
from vitral.api.engines import ENGINES, SLURM_FOLDER, Engine, SlurmOptions, sbatch_options
from vitral.api.study_runs import StudyJob, check_run
from vitral.atomic import write_text
from vitral.data.catalog import CATALOG
from vitral.display import SummaryRepr, displayed, duration
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen
from vitral.models.build import check_device
from vitral.recipe import Overrides, keys_of, override_list
from vitral.studies import report
from vitral.studies.claims import ClaimResult, check_claims
from vitral.studies.definition import Study, definition_of, parse_study, read_study, shipped, study_name
from vitral.studies.planning import CellResult, Plan, PlanCost, Record, plan, plan_cost, read_records, results, table

StudyAction = Literal["list", "run", "report"]
_STUDY = "study.json"  # which study a folder holds


@dataclass(frozen=True)
class StudyInfo:
    """A study that comes with the package."""

    name: str
    title: str
    source: str
    runs: int
    data: tuple[str, ...]
    scales: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class StudyList(SummaryRepr):
    """The studies that come with the package."""

    studies: tuple[StudyInfo, ...]

    def summary(self) -> dict[str, str]:
        return {entry.name: f"{entry.title} ({entry.source}), {entry.runs} runs" for entry in self.studies}

    def as_dict(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.studies]


@dataclass(frozen=True, repr=False)
class StudyRuns(SummaryRepr):
    """A study with its records: the plan, the table, and the commands of pending runs if requested."""

    study: Study
    folder: Path
    plan: Plan
    cost: PlanCost  # of what is pending
    cells: tuple[CellResult, ...]
    records: Mapping[str, Record]
    commands: tuple[str, ...] = ()

    def summary(self) -> dict[str, str]:
        done = self.plan.total - len(self.plan.pending) - self.plan.waiting
        return {"runs": f"{done} of {self.plan.total}", "folder": str(self.folder)}

    def table(self) -> tuple[list[str], list[list[str]]]:
        return table(self.study, self.cells)

    def as_dict(self) -> dict[str, Any]:
        columns, rows = self.table()
        return {
            "study": self.study.name,
            "scale": self.study.scale,
            "folder": str(self.folder),
            "runs": self.plan.total,
            "pending": [run.id for run in self.plan.pending],
            "waiting": self.plan.waiting,
            "cost": asdict(self.cost),
            "columns": columns,
            "rows": rows,
            "commands": list(self.commands),
        }


@dataclass(frozen=True, repr=False)
class StudyReport(SummaryRepr):
    """The claims of one or several studies, and the files that were written."""

    studies: tuple[StudyRuns, ...]
    claims: tuple[tuple[str, ClaimResult], ...]  # with the names of their studies
    files: tuple[Path, ...]

    def summary(self) -> dict[str, str]:
        verdicts = [result.verdict for _, result in self.claims]
        counts = {verdict: f"{verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts)}
        return {**counts, "files": ", ".join(map(str, self.files))}

    def as_dict(self) -> dict[str, Any]:
        claims = [
            {"study": name, "claim": result.claim.text, "verdict": result.verdict, "measured": result.measured}
            for name, result in self.claims
        ]
        studies = [report.as_dict(state.study, state.cells, state.records) for state in self.studies]
        return {"claims": claims, "studies": studies, "files": [str(path) for path in self.files]}


def study(
    action: StudyAction = "list",
    name: str | Path = "",
    *,
    data: Sequence[str] = (),
    init: str | Path = "",
    out: str | Path = "",
    scale: str = "small",
    only: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    dry_run: bool = False,
    print_commands: bool = False,
    keep: bool = False,
    device: str = "",
    set: Overrides = (),
    on_event: EventHandler | None = None,
) -> StudyList | StudyRuns | StudyReport:
    """Run a study of many runs, such as the paper's, and report on its claims.

    An interrupted study resumes with the same command, on this machine or on another that has its folder. Every run is
    recorded as one line of JSON; runs of several machines merge when their .jsonl files are copied together.

    Args:
        action: list (the included studies), run, or report (a page, a table and the claims).
        name: name of a study or a TOML file; for report, the folder of its runs, or one of several such folders.
        data: where the data sets of the study are, as NAME:FOLDER or NAME=SOURCE; or only SOURCE, if it has one.
        init: weights to start from instead of those named by the study.
        out: folder of the runs; results/NAME by default.
        scale: small, or another scale of the study, such as paper.
        only: ids of the runs to execute; by default all pending ones.
        engine: local, on the GPUs or cores of this machine, or slurm, as a job array.
        slurm: options of sbatch as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: number of concurrent runs; small runs may share a GPU. One per GPU by default.
        dry_run: only print the number of runs and their estimated cost.
        print_commands: only print one command per pending run, for a scheduler.
        keep: keep the run folders, with the models.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        set: keys of the recipe to change in all runs, such as steps=10; this makes them different runs.
        on_event: handler of notes about the progress.

    Returns:
        The studies; a study with its plan, its table and its records; or the claims with their verdicts.

    Raises:
        UserError: if an argument is wrong, before anything is written.
        Interrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    if action == "list":
        return StudyList(tuple(_info(entry) for entry in shipped()))
    if not name:
        raise UserError("NAME is missing: name a study (`vitral study list`), or a TOML file.")
    if action == "report":
        return write_report(Path(name))
    check_device(device)
    overrides = override_list(set)
    chosen = read_study(name, scale, keys_of(overrides))
    folder = Path(out or Path("results") / chosen.name)
    check_folder(folder, [], (_STUDY, "*.jsonl"))
    engine_options = {"parallel": parallel, "keep": keep, "device": device, "slurm": sbatch_options(slurm)}
    given = {"data": tuple(data), "init": str(init), "overrides": overrides, "only": tuple(only)}
    job = StudyJob(study=chosen, name=str(name), folder=folder, **given, **engine_options)
    with displayed(on_event) as handler:
        if dry_run:
            _check_data(job)
        if dry_run or print_commands:
            commands = (
                [shlex.join(["vitral", *job.arguments([run.id])]) for run in job.pending()] if print_commands else []
            )
            return replace(study_state(job), commands=tuple(commands))
        for run in job.pending():
            check_run(job.context, run)
        for note in describe_plan(study_state(job)):
            handler(Note(note))
        handler(RunDirChosen(str(folder)))
        _write_study(folder, name, chosen, overrides)
        tried: list[str] = []  # what failed, or was left to other processes, is not tried again
        while ids := [run.id for run in job.pending() if run.id not in tried]:
            ENGINES[engine](job, ids, handler)
            tried += ids
        state = study_state(job)
        if not state.plan.pending and not keep:
            for leftover in ("pixels", "running", "weights", *([SLURM_FOLDER] if engine == "slurm" else [])):
                shutil.rmtree(folder / leftover, ignore_errors=True)
    return state


def write_report(folder: Path) -> StudyReport:
    """Write report.html, report.md and report.json into the folder of a study, or of every study in a folder; of
    several, claims.md has all claims."""
    several = not (folder / _STUDY).is_file() and folder.is_dir()
    folders = sorted(path.parent for path in folder.glob(f"*/{_STUDY}")) if several else [folder]
    states = [open_folder(path) for path in folders]
    if not states:
        raise UserError(f"{folder} contains no study: pass a folder written by `vitral study run`.")
    files: dict[Path, str] = {}
    for state in states:
        parts = (state.study, state.cells, state.records)
        texts = {"html": report.html(*parts), "md": report.markdown(*parts)}
        texts["json"] = json.dumps(report.as_dict(*parts), indent=2) + "\n"
        files |= {state.folder / f"report.{suffix}": text for suffix, text in texts.items()}
    if several:
        files[folder / "claims.md"] = report.claims_table([(s.study, s.cells) for s in states])
    for path, text in files.items():
        write_text(path, text)
    claims = [(state.study.name, result) for state in states for result in check_claims(state.study, state.cells)]
    return StudyReport(tuple(states), tuple(claims), tuple(files))


def open_folder(folder: Path) -> StudyRuns:
    path = folder / _STUDY
    if not path.is_file():
        raise UserError(f"{folder} contains no study: pass a folder written by `vitral study run`.")
    settings = json.loads(path.read_text("utf-8"))
    definition = settings["definition"] or definition_of(settings["study"])
    chosen = parse_study(definition, settings["study"], settings["scale"], keys_of(settings["set"]))
    return study_state(StudyJob(study=chosen, name=settings["study"], folder=folder))


def study_state(job: StudyJob) -> StudyRuns:
    records = read_records(job.folder)
    current = plan(job.study, records)
    cost = plan_cost(job.study, current, records, _sizes(job) if current.pending else {})
    return StudyRuns(job.study, job.folder, current, cost, results(job.study, records), records)


def _check_data(job: StudyJob) -> None:
    """Refuse data that the pending runs could not open.

    A data set of the catalog, or of a study that states its number of images, need not be on this machine to estimate
    the cost, unless the user says where it is.
    """
    for name in job.study.data_names if job.pending() else ():
        if job.context.sources[name] != name or not (job.study.images or name in CATALOG):
            job.context.open(name)


def _sizes(job: StudyJob) -> dict[str, tuple[int, int]]:
    """Training images and classes of the data sets that are there."""
    sizes = {}
    for name in job.study.data_names:
        with suppress(UserError):
            train = job.context.open(name).train
            sizes[name] = (len(train), len(train.classes))
    return sizes


def describe_plan(state: StudyRuns) -> list[str]:
    """What is about to start: runs, FLOPs, time and memory."""
    cost, current = state.cost, state.plan
    if not cost.runs:
        return [f"all {current.total} runs are recorded in {state.folder}"]
    flops = "FLOPs unknown before the runs" if cost.flops is None else f"{cost.flops:.3g} FLOPs"
    time = "time unknown before the first run" if cost.seconds is None else f"about {duration(cost.seconds)} on one GPU"
    memory = f"{cost.peak_bytes / 1e9:.1f} GB of memory as recorded" if cost.peak_bytes else ""
    memory = memory or f"{cost.state_bytes / 1e9:.2f} GB for the largest model and its optimizer, and its activations"
    return [f"{cost.runs} of {current.total} runs to do: {flops}, {time}, {memory}"]


def _info(name: str) -> StudyInfo:
    chosen = read_study(name)
    scales = ("small", *definition_of(name).get("scales", {}))
    return StudyInfo(name, chosen.title, chosen.source, plan(chosen, {}).total, chosen.data_names, scales)


def _write_study(folder: Path, name: str | Path, chosen: Study, overrides: Sequence[str]) -> None:
    """Note which study a folder holds; the definition of one that does not come with the package is kept."""
    own = str(name) not in shipped()
    settings = {
        "study": chosen.name,
        "scale": chosen.scale,
        "set": list(overrides),
        "definition": definition_of(name) if own else None,
    }
    path = folder / _STUDY
    if path.is_file():
        before = json.loads(path.read_text("utf-8"))
        if (before["study"], before["scale"], before["set"]) != (study_name(name), chosen.scale, list(overrides)):
            raise UserError(f"{folder} contains another study ({before['study']}): choose another folder with --out.")
    write_text(path, json.dumps(settings, indent=2) + "\n")
