"""`vitral VERB ...`: find the verb, import it, run it. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import time
from typing import NamedTuple

from vitral.errors import Interrupted, UserError
from vitral.version import __version__


class Verb(NamedTuple):
    module: str
    function: str
    help: str


VERBS = {
    "demo": Verb("vitral.cli.demo", "demo", "train, fine-tune and predict in two minutes, on handwritten digits"),
    "train": Verb("vitral.cli.train", "train", "a folder of images in, a model out"),
    "predict": Verb("vitral.cli.predict", "predict", "name what is in images"),
    "evaluate": Verb("vitral.cli.predict", "evaluate", "measure a model on labelled images"),
    "embed": Verb("vitral.cli.predict", "embed", "features of images, to a file"),
    "inspect": Verb("vitral.cli.inspect", "inspect", "a page to see through a model: where it looks, what it learned"),
    "search": Verb("vitral.cli.inspect", "search", "images, or patches, that look like one"),
    "check": Verb("vitral.cli.predict", "check", "what is wrong with a data set"),
    "pretrain": Verb("vitral.cli.protocols", "pretrain", "the paper's pre-training: Table 3, masked patches, sweeps"),
    "finetune": Verb(
        "vitral.cli.protocols", "finetune", "the paper's fine-tuning: swept rate, several seeds, test once"
    ),
    "fewshot": Verb("vitral.cli.probes", "fewshot", "frozen features and a few images a class, in closed form"),
    "vtab": Verb("vitral.cli.vtab", "vtab", "the 19 tasks of VTAB-1k"),
    "dedupe": Verb("vitral.cli.probes", "dedupe", "training images that test images are copies of"),
    "bench": Verb("vitral.cli.bench", "bench", "how fast this machine is, beside other libraries"),
    "show": Verb("vitral.cli.train", "show", "a training recipe, every key with its meaning"),
    "list": Verb("vitral.cli.models", "list_", "the models, formats, recipes and data sets that vitral knows"),
    "cost": Verb("vitral.cli.models", "cost", "parameters, compute and training FLOPs of a model, without building it"),
    "info": Verb("vitral.cli.checkpoints", "info", "what a checkpoint is, without loading it"),
    "convert": Verb("vitral.cli.checkpoints", "convert", "rewrite a checkpoint in another format, with proof"),
}


def main() -> None:
    """The entry point. A user's mistake is one sentence and exit code 2; a traceback is for ours."""
    # Before torch loads: threads of GNU OpenMP that wait spinning slow a small model tenfold on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that a terminal cannot show is spelt out, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run(sys.argv[1:])
    except UserError as mistake:
        _fail(str(mistake))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has seen enough
        sys.exit(0)
    except OSError as error:
        _fail(_explained(error))
    except (MemoryError, RuntimeError) as error:
        if not _ran_out_of_memory(error):
            raise
        _fail("there is not enough memory for this: choose a smaller batch, image or model.")
    except (KeyboardInterrupt, Interrupted):
        sys.exit(130)


def _run(words: list[str]) -> None:
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
    elif words[0] in ("-V", "--version"):
        print(f"vitral {__version__}")
    elif words[0] in VERBS:
        _call(words[0], words[1:])
    else:
        import difflib

        near = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean `vitral {near[0]}`?" if near else "`vitral --help` lists the verbs."
        raise UserError(f'there is no verb "{words[0]}": {hint}')


def _call(name: str, words: list[str]) -> None:
    from vitral.cli.parsing import run_words

    verb = VERBS[name]
    run_words(name, getattr(importlib.import_module(verb.module), verb.function), words)


def _help() -> str:
    lines = ["vitral: Vision Transformers as the paper describes them, for every checkpoint.", ""]
    lines += ["  vitral VERB ...           `vitral VERB --help` explains a verb", ""]
    lines += [f"  {name:<9} {verb.help}" for name, verb in VERBS.items()]
    lines += ["", "Examples:", "  vitral train photos/ --init timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    lines += ["  vitral predict runs/photos new/*.jpg", "  vitral cost R50+ViT-B/16 --images 303e6 --epochs 7"]
    lines += ["  vitral convert ViT-B_16.npz vit-b16/ --format hf"]
    return "\n".join(lines)


def _explained(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some space and give the same command again; what was saved before is whole."
    where = f"{error.filename}: " if error.filename else ""
    fix = ": choose another place" if error.errno in (errno.EFBIG, errno.EROFS, errno.EACCES) else ""
    return f"{where}{error.strerror or error}{fix}."


def _ran_out_of_memory(error: Exception) -> bool:
    """Torch has an error of its own for GPUs (not named here: nothing heavy is imported) and a sentence for CPUs."""
    text, kinds = str(error), [kind.__name__ for kind in type(error).__mro__]
    return isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "can't allocate memory" in text


def _fail(sentence: str) -> None:
    """One sentence. Under torchrun the first process speaks for all, which is the end of the others before they speak;
    another one is heard where the mistake is its own."""
    if int(os.environ.get("RANK", 0)):
        time.sleep(3)
    print(f"vitral: {sentence}", file=sys.stderr)
    sys.exit(2)
