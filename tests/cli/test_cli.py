"""The command line: tables, JSON, one-sentence errors, exit codes."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from journeys import COLOURS, Command, colour_folder, paint

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card
from vitral.cli import VERBS, main
from vitral.models.build import build
from vitral.names import NAMES

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vitral", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    vitral.save(build(TINY), tmp_path / "tiny.safetensors", Card(TINY, class_names=("a", "b", "c")))
    return tmp_path / "tiny.safetensors"


def test_help_names_every_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert run(monkeypatch, verb, "--help") == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "None" not in shown  # no Python values in the help


def test_models_are_listed_with_their_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "list", "models") == 0
    table = capsys.readouterr().out
    assert "86,567,656" in next(line for line in table.splitlines() if "ViT-B/16 " in line)
    assert run(monkeypatch, "list", "models", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in rows] == list(NAMES)
    base = next(row for row in rows if row["model"] == "ViT-B/16")
    expected = {"layers": 12, "width": 768, "MLP": 3072, "heads": 12, "tokens": 197, "GMACs": 17.56}
    assert {key: base[key] for key in expected} == expected


def test_cost_prints_the_papers_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "cost", "R50+ViT-B/16", "--images", "303e6", "--epochs", "7") == 0
    shown = capsys.readouterr().out
    assert "98,659,112" in shown
    assert "274.1 exaFLOPs" in shown
    assert "274 exaFLOPs for this model" in shown
    assert run(monkeypatch, "cost", "R50x1+ViT-B/16", "--images", "303e6", "--epochs", "7", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["training_flops"] == pytest.approx(274e18, rel=0.02)


@pytest.mark.parametrize(
    "words",
    [
        ["--images", "303e6", "--epochs", "6"],
        ["--images", "303e6", "--epochs", "7", "--image", "384"],
        ["--images", "1e6", "--epochs", "7"],
    ],
)
def test_cost_of_another_run_has_no_number_of_the_paper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(monkeypatch, "cost", "ViT-B/16", *words) == 0
    assert "the paper" not in capsys.readouterr().out


def test_info_describes_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert run(monkeypatch, "info", str(file)) == 0
    shown = capsys.readouterr().out
    assert "3 (a, b, c)" in shown
    assert vitral.info(file).sha256 in shown
    assert run(monkeypatch, "info", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["card"]["architecture"]["width"] == 16


def test_convert_prints_its_certificate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "new.npz"
    words = ["convert", str(file), str(target), "--format", "big_vision", "--image", "12", "16", "--json"]
    assert run(monkeypatch, *words) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["difference"] == 0
    assert done["image"] == [12, 16]
    assert any("folded" in change for change in done["changes"])
    assert (
        run(monkeypatch, "convert", str(target), str(tmp_path / "b.npz"), "--format", "google", "--grid", "3", "4") == 0
    )
    assert "max |difference| 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 150528000000 bytes."),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_running_out_of_memory_is_one_sentence(
    error: Exception, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.api.models.cost_of", Mock(side_effect=error))
    result = command("cost", "ViT-B/16")
    assert result.code == 2
    assert result.err == "vitral: there is not enough memory for this: choose a smaller batch, image or model.\n"


def test_a_file_that_is_lost_meanwhile_is_one_sentence(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/a/metrics.jsonl")
    monkeypatch.setattr("vitral.api.models.cost_of", Mock(side_effect=error))
    fix = "do not remove or rename it while a command uses it; run the same command again"
    expected = f"vitral: runs/a/metrics.jsonl: No such file or directory: {fix}.\n"
    assert command("cost", "ViT-B/16") == (2, "", expected)


def test_other_errors_are_not_hidden(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.api.models.cost_of", Mock(side_effect=RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        command("cost", "ViT-B/16")


def test_a_closed_pipe_exits_with_code_0() -> None:
    script = f"{sys.executable} -m vitral list models | head -1; echo code ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("code 0\n")
    assert not done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (["lst"], "did you mean `vitral list`"),
        (["cost", "ViT-B17/3x"], "did you mean"),
        (["cost", "B/16@8"], "smaller than one patch"),
        (["cost", "B/16", "--images", "-1"], "above 0"),
        (["cost", "B/16", "--image", "1", "2", "3"], "height and a width"),
        (["info", "nowhere.npz"], "does not exist"),
        (["info", "."], "no weight file"),
        (["convert", "nowhere.npz", "x", "--format", "googel"], "write google"),
        (["convert", "nowhere.npz", "x"], "--format"),
        (["cost", "B/16", "--epoch", "3"], "--epoch"),
        (["cost", "B/16", "--epochs", "3"], "add --images"),
        (["help", "trian"], "did you mean `vitral train`"),
        (["info", "google/vit-base-patch16-224"], "or write hf:google/vit-base-patch16-224"),
        (["pretrain", "photos"], "with the recipe's name"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "digits", "--epoch", "3"), "`train` has no option --epoch: did you mean --epochs?"),
        (
            ("fewshot", "a", "b", "--colour"),
            "`fewshot` has no option --colour: `vitral fewshot --help` lists the options.",
        ),
        (("train", "digits", "--batch", "32"), "`train` has no option --batch: write --set batch=VALUE."),
        (("train", "digits", "--lr=3"), "`train` has no option --lr: write --set optim.lr=VALUE."),
        (("dedupe", "digits"), "missing: --against (data sets whose test images"),
        (
            ("bench", "trian"),
            'WORK takes train or infer or latency or data or predict or start or growth, not "trian": see',
        ),
        (("train", "digits", "--seeds", "x"), '--seeds takes a whole number, not "x": see `vitral train --help`.'),
        (("train", "digits", "--seed", "1.5"), '--seed takes a whole number, not "1.5"'),
        (("train", "digits", "--epochs", "three"), '--epochs takes a number, not "three"'),
        (("train", "digits", "--epochs"), "--epochs needs a value."),
        (("train", "digits", "--epochs", "--json"), "--epochs needs a value."),
        (("train", "digits", "--init", ""), "--init needs a value."),
        (("train", "digits", "--init="), "--init needs a value."),
        (("train", ""), "an argument is empty (a shell variable that is not set?): see `vitral train --help`."),
        (("train", "digits", "--ou", "x"), "`train` has no option --ou: did you mean --out?"),  # no abbreviations
        (("fewshot", "a", "b", "--l2", "x"), '--l2 takes a number or choose, not "x"'),
        (("search", "a", "b", "--query", "c", "--patch", "1"), "--patch expected 2 arguments: see"),
        (("train", "digits", "more", "words"), "not understood: more, words"),
        (("cost", "ViT-B/16", "--image", "x"), '--image takes a whole number, not "x"'),
        (("fewshot", "a", "b", "--shots", "x"), '--shots takes a whole number, not "x"'),
        (("inspect",), "missing: SOURCE (a run folder, weights, hf:owner/name or timm:name)"),
        (("predict", "a"), "missing: IMAGES (image files, and folders of them)"),
        (("vtab", "weights", "nowhere"), "weights does not exist"),
        (("train", "digits", "--set"), "--set needs KEY=VALUE."),
        (("train", "digits", "--set", "--json"), "--set needs KEY=VALUE."),
        (("train", "digits", "--set=", "--json"), "--set needs KEY=VALUE."),
        (("pretrain", "digits", "--model", "Ti/16", "--set"), "--set needs KEY=VALUE."),
        (("finetune", "a", "b", "--recipe", "c", "--set", "--json"), "--set needs KEY=VALUE."),
        (("vtab", "a", "b", "--sweep", "--set", "steps=1"), "--sweep needs KEY=VALUE,VALUE."),
        (("train", "digits", "--set", "seed=1", "--set", "batch=2"), "--set is given twice: write it once"),
        (
            ("train", "digits", "--set", "epochs=1", "--epochs", "2"),
            "epochs is given twice, as an option and as --set epochs=...",
        ),
        (("train", "digits", "--seed", "0", "--set", "batch=2", "seed = 1"), "seed is given twice"),
        (("train", "digits", "--init", "a", "--set", "init=b"), "init is given twice"),
        (("show", "--set", "model=ViT-B/16", "--model", "ViT-L/16"), "model is given twice"),
        (("pretrain", "digits", "--model", "Ti/16", "--set", "model=B/16"), "model is given twice"),
        (("finetune", "a", "b", "--recipe", "c", "--set", "init=d"), "init is given twice"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stderr
    assert run(monkeypatch, *words) == 2
    assert sys.stderr is before
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith(f"vitral: {expected}")
    assert result.err.count("\n") == 1


# Verbs that take a model and then images or data, and the options that they need.
AFTER_A_MODEL = {
    "predict": ("images", ["--top", "2"]),
    "evaluate": ("data", ["--split", "test"]),
    "embed": ("images", ["-o", "out.npz"]),
    "inspect": ("images", ["-o", "out.html"]),
    "search": ("folder", ["--query", "photos/a/1.png"]),
    "fewshot": ("data", ["--shots", "1"]),
    "finetune": ("data", ["--recipe", "paper:finetune/pets"]),
    "vtab": ("root", ["--fixed"]),
}


@pytest.fixture
def model_and_photos(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in a file, one in a run folder, and a folder of pictures."""
    folder = file.parent
    colour_folder(folder / "photos", 2)
    (folder / "run").mkdir()
    shutil.copy(file, folder / "run" / "model.safetensors")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("model", ["tiny.safetensors", "run"])
@pytest.mark.parametrize("verb", AFTER_A_MODEL)
def test_a_model_given_second_is_suggested_first(
    command: Command, model_and_photos: Path, verb: str, model: str
) -> None:
    second, options = AFTER_A_MODEL[verb]
    result = command(verb, "photos", model, *options)
    order = f"`{verb}` takes the model first, then the {second}"
    right = shlex.join(["vitral", verb, model, "photos", *options])
    assert result == (2, "", f"vitral: {order}: write `{right}`.\n")


def test_the_suggested_command_works(command: Command, model_and_photos: Path) -> None:
    (model_and_photos / "my photos").mkdir()
    pictures = [
        paint(model_and_photos / "my photos" / f"{number}.png", COLOURS["red"], number).name for number in range(5)
    ]
    words = ["--preprocess", "decode|resize(8)|value_range(-1, 1)", *(f"my photos/{name}" for name in pictures[:3])]
    message = command("predict", *words, "tiny.safetensors").err
    again = shlex.split(message[message.index("`vitral ") :].strip("`.\n"))
    assert again == ["vitral", "predict", "tiny.safetensors", *words[2:], *words[:2]]
    assert command(*again[1:]).code == 0
    many = command("predict", *(f"my photos/{name}" for name in pictures), "tiny.safetensors").err
    assert "`vitral predict tiny.safetensors 'my photos/0.png' 'my photos/1.png' 'my photos/2.png' ...`" in many


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("predict", "photos", "timm:a"), "write `vitral predict timm:a photos`."),
        (("predict", "photos", "hf:a/b"), "write `vitral predict hf:a/b photos`."),
        (("evaluate", "photos", "timm:a"), "write `vitral evaluate timm:a photos`."),
        (("evaluate", "digits", "run"), "write `vitral evaluate run digits`."),
        (("evaluate", "photos", "hf:a/b"), "the folder photos contains no weight file"),  # a data set, perhaps
        (("predict", "nothing", "."), "nothing does not exist"),  # among pictures a model may lie
        (("predict", "photos", "nothing"), "nothing does not exist"),
        (("predict", "photos", "photos"), "the folder photos contains no weight file"),
        (("evaluate", "tiny.safetensors", "run"), "run has no class folders"),
        (("inspect", "photos"), "the folder photos contains no weight file"),
        (("convert", "photos", "tiny.safetensors", "--format", "timm"), "tiny.safetensors exists"),
    ],
)
def test_an_order_is_suggested_only_where_it_is_certain(
    command: Command, model_and_photos: Path, words: tuple[str, ...], says: str
) -> None:
    result = command(*words)
    assert result.code == 2
    assert says in result.err
    assert ("the model first" in result.err) == says.startswith("write")


def test_a_folder_that_is_not_writable(file: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file, not a folder")
    target = tmp_path / "plain" / "x.npz"
    source = Path(vitral.__file__).parents[1]
    words = [sys.executable, "-m", "vitral", "convert", str(file), str(target), "--format", "google"]
    done = subprocess.run(words, capture_output=True, text=True, env={"PYTHONPATH": str(source), "PATH": ""})
    assert done.returncode == 2
    assert done.stderr.startswith("vitral: ")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_prints_no_error() -> None:
    source = Path(vitral.__file__).parents[1]
    words = f"{sys.executable} -m vitral list models | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"},
    )
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are text")
def test_a_file_name_that_is_not_utf8_can_be_printed(tmp_path: Path) -> None:
    folder = colour_folder(tmp_path / "colours", 6)
    (folder / next(iter(COLOURS))).rename(folder / b"caf\xe9".decode("utf-8", "surrogateescape"))
    source = Path(vitral.__file__).parents[1]
    strict = {"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8:strict"}
    words = [sys.executable, "-m", "vitral", "check", str(folder)]
    for more in ([], ["--json"]):
        done = subprocess.run([*words, *more], capture_output=True, text=True, env=strict)
        assert done.returncode == 0, done.stderr  # a slow machine also prints its progress there
        assert "caf\\udce9" in done.stdout
    json.loads(done.stdout)


def test_a_mistake_that_several_processes_make_is_printed_once(tmp_path: Path) -> None:
    """As torchrun starts them on one machine; a mistake that only one of them makes is printed, too."""
    words = [["lst"], ["lst"], ["lst"], ["cost", "ViT-B/16", "--imags", "1"], ["lst"]]
    started = []
    for rank, each in enumerate(words):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        torchrun = {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
        environment = {**os.environ, "PYTHONPATH": str(Path(vitral.__file__).parents[1]), **torchrun}
        command = [sys.executable, "-m", "vitral", *each]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=600)[1] for process in started]
    assert [process.returncode for process in started] == [2] * 5
    assert "did you mean `vitral list`" in "".join(errors)
    assert "--imags" in errors[3]
    assert sorted(text.count("\n") for text in errors) == [0, 0, 0, 1, 1]


# Ctrl-C in the middle of the first import of torch, once: what is left of it cannot be imported again.
STOPPED = """
import sys
class Stop:
    def find_spec(self, name, path, target=None):
        if name == "torch.nn":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
from vitral.cli import main
main()
"""


@pytest.mark.parametrize("words", [("train", "digits"), ("finetune", "weights", "digits", "--recipe", "mine.toml")])
def test_an_early_interrupt_is_silent(words: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(vitral.__file__).parents[1])}
    command = [sys.executable, "-c", STOPPED, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_is_written_into_a_folder_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "red").mkdir()
    assert run(monkeypatch, "train", str(tmp_path), "--out", str(tmp_path), "--track", "tensorboard") == 2
    assert "is inside the data folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["red"]
