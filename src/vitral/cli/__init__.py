"""`vitral VERB ...`: parse the arguments, call the verb's Python function, print its result.

Nothing heavy is imported before a verb runs: names, types and help texts are read from the source of `vitral.api`.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitral.errors import Interrupted, PartsWritten, UserError, printable
from vitral.version import __version__

if TYPE_CHECKING:
    from vitral.display import Display


class Verb(NamedTuple):
    """Where a verb's function and the renderer of its result are."""

    module: str  # of vitral.api
    function: str
    renderer: str  # "module.function" of vitral.cli
    own_json: bool = False  # the renderer prints JSON itself, not the result's `as_dict`


VERBS = {
    "demo": Verb("training", "demo", "training.show_demo"),
    "train": Verb("training", "train", "training.show_training", own_json=True),
    "predict": Verb("prediction", "predict", "results.show_predictions", own_json=True),
    "serve": Verb("serve", "serve", "results.show_served"),
    "evaluate": Verb("evaluation", "evaluate", "results.show_evaluation"),
    "embed": Verb("prediction", "embed", "results.show_embeddings"),
    "inspect": Verb("inspection", "inspect", "results.show_inspection"),
    "search": Verb("features", "search", "results.show_neighbours"),
    "check": Verb("check", "check", "results.show_check", own_json=True),
    "pretrain": Verb("protocols", "pretrain", "training.show_protocol"),
    "finetune": Verb("protocols", "finetune", "training.show_protocol"),
    "fewshot": Verb("features", "fewshot", "results.show_probes"),
    "study": Verb("study", "study", "training.show_study"),
    "vtab": Verb("vtab", "vtab1k", "training.show_vtab"),
    "dedupe": Verb("check", "dedupe", "results.show_duplicates"),
    "bench": Verb("bench", "benchmark", "results.show_benchmark"),
    "show": Verb("recipes", "show_recipe", "training.show_recipe", own_json=True),
    "list": Verb("models", "list_available", "results.show_available"),
    "cost": Verb("models", "compute_cost", "results.show_cost"),
    "info": Verb("checkpoints", "info", "results.show_info"),
    "convert": Verb("checkpoints", "convert", "results.show_conversion"),
    "export": Verb("export", "export_model", "results.show_export"),
    "push": Verb("hub", "push", "results.show_push"),
}
_EXAMPLES = """Examples:
  vitral train photos/ --init timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k
  vitral train photos/ --model ViT-Ti/16 --epochs 50 --set optim.lr=0.001 data.mixup=0.2
  vitral predict runs/photos new/*.jpg
  vitral cost R50+ViT-B/16 --images 303e6 --epochs 7
  vitral convert ViT-B_16.npz vit-b16/ --format hf"""


def main() -> None:
    """Run the command line. A `UserError` is printed as one sentence, with exit code 2; a traceback means a bug."""
    # Before torch loads: threads of GNU OpenMP that wait spinning slow a small model tenfold on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["help"] and arguments[1:]:
            arguments = [*arguments[1:], "--help"]
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help())
        elif arguments[0] in ("-V", "--version"):
            print(f"vitral {__version__}")
        else:
            run_verb(arguments[0], arguments[1:])
    except UserError as mistake:
        _fail(str(mistake), mistake.exit_code)
    except PartsWritten as written:
        print(printable(str(written)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has closed the pipe
        sys.exit(0)
    except OSError as error:
        _fail(_explained(error))
    except (MemoryError, RuntimeError) as error:
        if not _ran_out_of_memory(error):
            raise
        _fail("there is not enough memory for this: choose a smaller batch, image or model.")
    except (KeyboardInterrupt, Interrupted) as stop:
        sys.exit(getattr(stop, "exit_code", 130))  # 130: Ctrl-C, 143: SIGTERM


def run_verb(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a verb, call its function of `vitral.api` under a progress display, print the result."""
    if name not in VERBS:
        raise UserError(f'there is no verb "{name}": {_nearest_verb(name)}')
    from vitral.cli.parsing import VerbParser, read_signature, swapped_order

    verb = VERBS[name]
    signature = read_signature(f"vitral.api.{verb.module}", verb.function)
    values = VerbParser(name, signature).parse_values(arguments)
    keywords = {key: value for key, value in values.items() if key != "json"}
    positional = [keywords.pop(parameter.name) for parameter in signature.parameters if parameter.positional]
    from vitral.display import Display

    rank = _rank()  # of a torchrun: only the first process reports
    resumes = any(parameter.name == "out" for parameter in signature.parameters)
    with Display(quiet=rank > 0 or not signature.takes_events) as display, _resume_hint(display, resumes):
        function = getattr(importlib.import_module(f"vitral.api.{verb.module}"), verb.function)
        if signature.takes_events:
            keywords["on_event"] = display
        try:
            result = function(*positional, **keywords)
        except UserError as mistake:
            if hint := swapped_order(name, signature, values, arguments):
                raise UserError(hint) from mistake
            raise
    if rank:
        return
    if values["json"] and not verb.own_json:
        from vitral.cli.results import print_json

        print_json(result if isinstance(result, list) else result.as_dict())
    else:
        module, _, renderer = verb.renderer.partition(".")
        getattr(importlib.import_module(f"vitral.cli.{module}"), renderer)(result, values)


def _help() -> str:
    from vitral.cli.parsing import read_summary

    lines = ["vitral: train, fine-tune, convert, inspect, export and serve Vision Transformers.", ""]
    lines += ["  vitral VERB ...           `vitral VERB --help` explains a verb", ""]
    for name, verb in VERBS.items():
        summary = read_summary(f"vitral.api.{verb.module}", verb.function)
        lines.append(f"  {name:<9} {summary.rstrip('.')}")
    return "\n".join([*lines, "", _EXAMPLES])


def _nearest_verb(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, VERBS, n=1)
    return f"did you mean `vitral {near[0]}`?" if near else "`vitral --help` lists the verbs."


@contextmanager
def _resume_hint(display: Display, resumes: bool) -> Iterator[None]:
    """Where a run is interrupted or the disk is full, say how to resume it; `resumes`: the verb takes --out."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if display.folder and resumes:  # otherwise the run has not begun
            saved = f"; the state of step {display.saved_step:,} is saved" if display.saved_step else ""
            display.print(f"stopped{saved}; resume with: {_same_command(display.folder)}")
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (display.folder and resumes):
            raise
        raise UserError(
            "the disk is full: free some space; earlier checkpoints are complete, and the run resumes with "
            f"`{_same_command(display.folder)}`."
        ) from error


def _same_command(folder: str) -> str:
    """What the user typed, with the run folder where that was not given."""
    arguments = sys.argv[1:]
    if not any(word.partition("=")[0] == "--out" for word in arguments):
        arguments = [*arguments, "--out", folder]
    return f"{'torchrun ... -m vitral' if 'RANK' in os.environ else 'vitral'} {shlex.join(arguments)}"


def _explained(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some space and run the same command again; files written before are complete."
    where = f"{error.filename}: " if error.filename else ""
    fixes = dict.fromkeys((errno.EFBIG, errno.EROFS, errno.EACCES), ": choose another path")
    fixes[errno.ENOENT] = ": do not remove or rename it while a command uses it; run the same command again"
    return f"{where}{error.strerror or error}{fixes.get(error.errno or 0, '')}."


def _ran_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out: torch's class for GPUs (by name: torch is not imported here), or its
    message for CPUs, for which it has no class."""
    classes = [base.__name__ for base in type(error).__mro__]
    return isinstance(error, MemoryError) or "OutOfMemoryError" in classes or "can't allocate memory" in str(error)


def _fail(sentence: str, code: int = 2) -> None:
    """Print one sentence and exit. Of the processes that torchrun starts on a machine, the first to make a
    mistake prints it, and the others that make the same are silent."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # empty if torchrun keeps no files
    if error_file:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent as soon as another process has ended
    if not error_file or _claim(sentence, Path(error_file).parents[1]):
        print(f"vitral: {printable(sentence)}", file=sys.stderr)
    sys.exit(code)


def _claim(sentence: str, folder: Path) -> bool:
    """Whether this process is the first to print the sentence; the folder is one that torchrun makes at each start."""
    import hashlib

    name = hashlib.sha256(sentence.encode(errors="backslashreplace")).hexdigest()
    try:
        (folder / f"vitral-{name[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the folder is gone or cannot be written: better twice than never
        return True
    return True


def _rank() -> int:
    """The number of this process; the variables that torchrun sets are checked, as torch would fail with a
    traceback."""
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    for name in numbers:
        text = os.environ.get(name, str(numbers[name]))
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise UserError(f"the environment variable {name}={text[:40]} is not a number: unset it, or use torchrun.")
        numbers[name] = int(text)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if numbers["WORLD_SIZE"] > 1 and missing:
        raise UserError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']} asks for several processes but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start them with torchrun, or unset WORLD_SIZE."
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise UserError(f"RANK={numbers['RANK']} is not below WORLD_SIZE={numbers['WORLD_SIZE']}: use torchrun.")
    return numbers["RANK"]
