"""The command line from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kernelwarehouse import get_temperature, load, plan_of
from kernelwarehouse.cli import main
from kernelwarehouse.data import open_dataset
from kernelwarehouse.training.predict import open_trained

TINY = "--model-arg channels=[8,8,16,16] --model-arg layers=[1,1,1,1] --workers 0 --device cpu"


@pytest.fixture(scope="module")
def run(striped_npz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, by the command."""
    output = tmp_path_factory.mktemp("runs") / "run"
    settings = "--epochs 6 --batch-size 16 --seed 1 --set learning_rate=0.05 --set flip=0.0 --set crop=none"
    words = f"train resnet18 --data {striped_npz} --recipe small --output {output} {settings} {TINY}"
    assert main(words.split()) == 0
    return output


def test_training_ends_with_a_report(run: Path) -> None:
    assert "resnet18" in (run / "report.html").read_text(encoding="utf-8")


def test_overrides_are_stored_with_the_run(run: Path) -> None:
    settings = json.loads((run / "run.json").read_text())
    assert settings["seed"] == 1
    assert settings["arguments"] == {"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}
    recipe = settings["recipe"]
    assert (recipe["epochs"], recipe["batch_size"], recipe["learning_rate"], recipe["crop"]) == (6, 16, 0.05, "none")


def test_eval_prints_what_a_count_by_hand_gives(
    run: Path, striped_npz: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"eval {run} --data {striped_npz} --workers 0 --batch-size 10".split()) == 0
    shown = capsys.readouterr().out
    trained, images = open_trained(run), open_dataset(str(striped_npz)).validation
    with torch.no_grad():
        logits = trained.network.eval()(trained.prepare([images.load(number) for number in range(25)]))
    right = int((logits.argmax(1).numpy() == images.labels).sum())
    loss = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(images.labels)))
    assert right > 12
    assert all(text in shown for text in (f"{right / 25:.2%}", f"{loss:.4f}", "25"))


def test_predict_prints_the_likeliest_classes(
    run: Path, striped_npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = open_dataset(str(striped_npz)).validation
    picture = tmp_path / "picture.png"
    images.load(3).save(picture)
    assert main(["predict", str(run), str(picture), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    [guesses] = open_trained(run).predict([images.load(3)], top=2)
    assert len(guesses) == 2
    for name, share in guesses:
        assert name in shown
        assert f"{share:.2%}" in shown
    assert sum(share for _, share in open_trained(run / "last").predict([images.load(3)], top=4)[0]) == pytest.approx(1)


def test_training_begins_at_the_logits(striped_npz: Path, tmp_path: Path) -> None:
    output, settings = tmp_path / "run", "--epochs 1 --batch-size 16 --set learning_rate=0.05 --report-every 1"
    words = f"train kw1x_resnet18 --data {striped_npz} --recipe small --output {output} {settings} {TINY}"
    assert main([*words.split(), "--model-arg", "begin=logits"]) == 0
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert {line["tau"] for line in lines if "tau" in line} == {0}
    network = load(output / "best")
    assert get_temperature(network) == 0
    assert {warehouse.begin for warehouse in plan_of(network).warehouses} == {"logits"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train resnet18 --data {data} --recipe modern --output {out}", "recipe 'modern' is unknown"),
        ("train resnet18 --data {data} --recipe small --output {out} --set mixupp=1", "did you mean 'mixup'"),
        ("train resnet18 --data {data} --recipe small --output {out} --model-arg depth", "must look like name=value"),
        ("train resnet18 --data nowhere --recipe small --output {out}", "'nowhere' is not there"),
        ("train resnet18 --data {data} --recipe small --output {out} --device tpu9", "device 'tpu9'"),
        ("train resnet18 --data {data} --recipe small --output {out} --report-every 0", "at least 1"),
        ("eval {out} --data {data}", "is not the folder of a run"),
        ("eval {run} --data embedded", "embedded has 10 classes (t-shirt, trouser, pullover, ...), the network was"),
        ("eval {run} --data {data} --batch-size 0", "must be at least 1"),
        ("predict {run} {data}", "striped.npz: cannot identify image file"),
        ("predict {run} missing.jpg", "missing.jpg"),
    ],
)
def test_bad_commands_say_what_would_be_right(
    run: Path, striped_npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    filled = words.format(data=striped_npz, run=run, out=tmp_path / "out")
    assert main(filled.split()) == 2
    assert message in capsys.readouterr().err


def test_other_classes_do_not_fit(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(tmp_path / "data" / "val" / name / "0.png")
    assert main(["eval", str(run), "--data", str(tmp_path / "data")]) == 2
    assert "2 classes (a, b), the network was trained for 4" in capsys.readouterr().err
