"""Commands that cannot work end with one line that says what is wrong and what would be right, and status 2."""

import shlex
from pathlib import Path

import pytest
from bad_places import GOOD, TRAIN, make_places

from kernelwarehouse.cli import main

# After the command, what its error must tell. Names in braces are from bad_places; TRAIN is a whole command that works,
# and GOOD its options, for one thing to be wrong with them: of an option that is given twice, the last counts.
USAGE = [
    ("", "the following arguments are required: command"),
    ("fit", "invalid choice: 'fit' (choose from"),
    ("--colour", "required: command"),
    ("plan", "required: model; see kernelwarehouse plan --help"),
    ("plan resnet18 resnet34", "unrecognized arguments: resnet34"),
    ("plan resnet18 --norm group", "argument --norm: invalid choice: 'group' (choose from"),
    ("zoo --exclude x", "unrecognized arguments: --exclude x"),
    ("train resnet18", "required: --data, --recipe, --output"),
    ("TRAIN --epochs nan", "argument --epochs: invalid int value: 'nan'"),
    ("TRAIN --batch-size 1e3", "argument --batch-size: invalid int value: '1e3'"),
    ("TRAIN --workers two", "argument --workers: invalid int value: 'two'"),
    ("TRAIN --seed 0.5", "argument --seed: invalid int value: '0.5'"),
    ("TRAIN --checkpoint-seconds soon", "argument --checkpoint-seconds: invalid float value: 'soon'"),
    ("TRAIN --unreadable maybe", "argument --unreadable: invalid choice: 'maybe'"),
    ("TRAIN --output ''", "argument --output: it is empty; a name or a path is wanted"),
    ("TRAIN --data ''", "argument --data: it is empty"),
    ("TRAIN --from ''", "argument --from: it is empty"),
    ("eval {run}", "required: --data"),
    ("eval '' --data {data}", "argument RUN: it is empty"),
    ("predict {run}", "required: PICTURE"),
    ("predict {run} ''", "argument PICTURE: it is empty"),
    ("predict {run} {picture} --top many", "argument --top: invalid int value: 'many'"),
    ("compare kw1x_resnet18 --format pdf", "argument --format: invalid choice: 'pdf'"),
    ("compare kw1x_resnet18 --plot ''", "argument --plot: it is empty"),
]
PLAN = [
    ("plan resnet1", "there is no network 'resnet1'; did you mean resnet"),
    ("plan ''", "there is no network ''"),
    ("plan RESNET18", "there is no network 'RESNET18'"),
    ("plan '[/red]'", "there is no network '[/red]'; 'kernelwarehouse zoo' and timm.list_models() list them"),
    ("plan resnet18.zzz", "resnet18 has no weights tagged 'zzz'; there are resnet18."),
    ("plan kw1x_resnet18.zzz", "kw1x_resnet18 has no weights tagged 'zzz'; it has none; write kw1x_resnet18"),
    ("plan hf-hub:timm/resnet18", "there is no network 'hf-hub:timm/resnet18'"),
    ("plan local-dir:{folder}", "there is no network 'local-dir:"),
    ("plan resnet18 --budget ''", "budget is ''; a number such as 1, 0.5 or '1/2' is wanted"),
    ("plan resnet18 --budget 0", "budget is 0; it must be above 0 and at most 1024"),
    ("plan resnet18 --budget=-1/2", "budget is -0.5; it must be above 0"),
    ("plan resnet18 --budget nan", "budget is 'nan'; a number"),
    ("plan resnet18 --budget inf", "budget is 'inf'; a number"),
    ("plan resnet18 --budget 1e99", "budget is 1e+99; it must be above 0 and at most 1024"),
    ("plan resnet18 --budget 1/0", "budget is '1/0'; a number"),
    ("plan resnet18 --in-ratio 2", "in_ratio is 2; it must be above 0 and at most 1"),
    ("plan resnet18 --out-ratio x", "out_ratio is 'x'; a number"),
    ("plan resnet18 --reduction 0", "reduction is 0; it must be above 0 and at most 16"),
    ("plan resnet18 --low-rank nan", "low_rank is 'nan'; a number"),
    ("plan resnet18 --sharing none --budget 1/2", "sharing 'none' needs a whole budget of 1 or more, not 0.5"),
    ("plan resnet18 --sharing none --low-rank 1/2", "sharing 'none' has no low-rank attention"),
    ("plan resnet18 --start many_to_one --budget 1/2", "start 'many_to_one' needs a budget of 1 or more"),
    ("plan resnet18 --start one_to_many --budget 4", "start 'one_to_many' needs a budget of at most 1"),
    ("plan resnet18 --exclude zzz", "pattern 'zzz' matches no layer; layers are named like conv1"),
    ("plan resnet18 --exclude '[/red]'", "pattern '[/red]' matches no layer"),
    ("plan resnet18 --exclude ''", "exclude contains ''; patterns are non-empty text"),
    ("plan resnet18 --exclude '*'", "all 21 layers that could be converted are excluded"),
    ("plan kw1x_resnet18 --exclude zzz", "kw1x_resnet18 has settings of its own; --exclude goes with a timm model"),
    ("plan kw1x_resnet18 --budget 1", "kw1x_resnet18 has settings of its own; --budget goes"),
    ("plan kw1x_resnet18 --norm batch", "settings of its own; --norm goes"),
    ("plan kw1x_resnet18 --reduction 1/16 --sharing layer", "settings of its own; --reduction, --sharing goes"),
    ("plan kw1x_resnet18 --no-spatial-partition", "settings of its own; --no-spatial-partition goes"),
    ("plan resnet18 --json {folder}", "it is a folder, and a file is wanted"),
    ("plan resnet18 --json .", "it is a folder, and a file is wanted"),
    ("plan resnet18 --json {pipe}", "it is a device or a pipe, and a file is wanted"),
    ("plan resnet18 --json {missing}/plan.json", "the plan cannot be written to"),
    ("plan resnet18 --json {file}/plan.json", "Not a directory"),
    ("plan resnet18 --json /proc/plan.json", "the plan cannot be written to /proc/plan.json"),
]
NETWORK = [
    ("train zzz GOOD", "there is no network 'zzz'"),
    ("train resnet18.zzz GOOD", "resnet18 has no weights tagged 'zzz'; there are resnet18."),
    (
        "train vit_tiny_patch16_224 GOOD",
        "cannot take images of 16 x 16 (AssertionError: Input height (16) doesn't match",
    ),
    ("train kw1x_deit_tiny GOOD", "--model-arg img_size=... if the network is made for one size"),
    ("train small_resnet GOOD --model-arg pretrained=true", "small_resnet has no weights to download"),
    ("train kw1x_resnet18 GOOD --model-arg pretrained=true", "kw1x_resnet18 has no weights to download"),
    ("TRAIN --model-arg depth", "--model-arg 'depth' must look like name=value"),
    ("TRAIN --model-arg =3", "--model-arg '=3' must look like name=value"),
    ("TRAIN --model-arg num_classes=7", "num_classes is not to be chosen for a run: it is as many as the data has"),
    ("TRAIN --model-arg in_chans=1", "in_chans is not to be chosen for a run: it is 3, since images are read as RGB"),
    ("TRAIN --model-arg checkpoint_path={missing}", "which is no file; the weights of resnet18 are wanted there"),
    ("TRAIN --model-arg checkpoint_path={folder}", "which is no file"),
    ("TRAIN --model-arg checkpoint_path={file}", "resnet18 cannot be built with"),
    (
        "TRAIN --model-arg pretrained=true --model-arg 'pretrained_cfg_overlay={{file=\"{missing}\"}}'",
        "without weights to load or fetch (such as pretrained) it starts from new ones",
    ),
    ("TRAIN --model-arg pretrained_cfg=zzz", "without weights to load or fetch"),
    ("TRAIN --model-arg pretrained_cfg=3", "resnet18 cannot be built with"),
    ("TRAIN --model-arg zzz=3", "got an unexpected keyword argument 'zzz'"),
    ("TRAIN --model-arg name=x", "got an unexpected keyword argument 'name'"),
    ("TRAIN --model-arg model_name=x", "multiple values for argument 'model_name'"),
    ("TRAIN --model-arg channels=7", "resnet18 cannot be built with"),
    ("TRAIN --model-arg channels=[8]", "cannot take images of 16 x 16 (AttributeError"),
    ("TRAIN --model-arg channels=[0,8,8,8]", "cannot take images of 16 x 16"),
    ("TRAIN --model-arg block=zzz", "resnet18 cannot be built with"),
    ("TRAIN --model-arg act_layer=zzz", "KeyError: 'zzz'"),
    ("TRAIN --model-arg global_pool=zzz", "Invalid pool type: zzz"),
    ("TRAIN --model-arg output_stride=3", "AssertionError"),
    ("TRAIN --model-arg drop_rate=2", "dropout probability has to be between 0 and 1"),
    ("TRAIN --model-arg drop_rate=x", "could not convert string to float: 'x'"),
    ("TRAIN --model-arg features_only=true", "resnet18 gives list for one image, but (1, 4) is wanted"),
    ("TRAIN --model-arg device=meta", "cannot take images"),
    ("TRAIN --from {missing}", "a directory written by kernelwarehouse.save is wanted"),
    ("TRAIN --from {file}", "Not a directory"),
    ("TRAIN --from {run}", "a directory written by kernelwarehouse.save is wanted"),
    ("TRAIN --from {run}/best --model-arg channels=[8,8,8,16]", "--from wants the same network"),
    ("TRAIN --from {weights_cut}/best", "cannot be read"),
]
OPTIONS = [
    ("TRAIN --epochs 0", "epochs (=0) must be above 0"),
    ("TRAIN --epochs 9999999999999999999999", "must be above 0 and at most 1000000"),
    ("TRAIN --batch-size -8", "batch_size (=-8) must be above 0"),
    ("TRAIN --batch-size 1000000000000", "batch size 1000000000000 is larger than the 16 training images"),
    ("TRAIN --device-batch-size -1", "device_batch_size (=-1) must be at least 0"),
    ("TRAIN --device-batch-size 3", "choose a device batch size that divides 8"),
    ("TRAIN --workers -1", "workers (=-1) must be 0, to read in this process, or at most 256"),
    ("TRAIN --workers 300", "workers (=300) must be 0, to read in this process, or at most 256"),
    ("TRAIN --report-every 0", "report_every (=0) must be at least 1"),
    ("TRAIN --checkpoint-seconds nan", "checkpoint_seconds (=nan) must be at least 0"),
    ("TRAIN --checkpoint-seconds=-1", "checkpoint_seconds (=-1.0) must be at least 0"),
    ("TRAIN --device mps", "device 'mps' is not for training here; expected cpu, cuda or cuda:N"),
    ("TRAIN --device meta", "device 'meta' is not for training here"),
    ("TRAIN --device cpu:7", "device 'cpu:7' is not for training here"),
    ("TRAIN --device cuda:", "device 'cuda:' is not for training here"),
    ("TRAIN --device '[/red]'", "device '[/red]' is not for training here"),
    ("TRAIN --device cuda:999", "device 'cuda:999'"),
    ("TRAIN --output {file}", "cannot be made a folder"),
    ("TRAIN --output {file}/run", "cannot be made a folder"),
    ("TRAIN --output {pipe}/run", "cannot be made a folder"),
    ("TRAIN --output /proc/run", "cannot be made a folder"),
    ("TRAIN --output {run} --seed 7", "seed: there 0, now 7"),
]
RECIPE = [
    ("TRAIN --recipe modern", "recipe 'modern' is unknown; there are advanced"),
    ("TRAIN --recipe {folder}", "or the path of a .toml"),
    ("TRAIN --recipe {missing}.toml", "No such file"),
    ("TRAIN --recipe {file}/a.toml", "Not a directory"),
    ("TRAIN --recipe {binary_toml}", "binary.toml' cannot be read as text"),
    ("TRAIN --recipe {empty_toml}", "does not say summary, epochs"),
    ("TRAIN --recipe {bad_toml}", "is not valid TOML"),
    ("TRAIN --recipe {markup_toml}", "'[/red]' is unknown"),
    ("TRAIN --set mixupp=1", "recipe field 'mixupp' is unknown; did you mean 'mixup'?"),
    ("TRAIN --set epochs=2", "epochs is given twice, by an option of its own (=1) and by --set"),
    ("TRAIN --set flip", "override 'flip' must look like field=value"),
    ("TRAIN --set =1", "recipe field '' is unknown"),
    ("TRAIN --set flip=2", "flip (=2.0) must be at least 0 and at most 1"),
    ("TRAIN --set flip=nan", "flip (=nan) must be at least 0 and at most 1"),
    ("TRAIN --set flip=often", "flip (='often') must be of type float"),
    ("TRAIN --set flip=[1]", "flip (=[1]) must be of type float"),
    ("TRAIN --set compile=1", "compile (=1) must be of type bool"),
    ("TRAIN --set learning_rate=inf", "learning_rate (=inf) must be above 0"),
    ("TRAIN --set learning_rate=1e308", "learning_rate (=1e+308) must be above 0 and at most 1e+30"),
    ("TRAIN --set warmup_learning_rate=-1", "warmup_learning_rate (=-1.0) must be at least 0"),
    ("TRAIN --set decay_factor=nan", "decay_factor (=nan) must be above 0"),
    ("TRAIN --set momentum=1", "momentum (=1.0) must be at least 0 and below 1"),
    ("TRAIN --set schedule=linear", "schedule (='linear') must be one of cosine, step"),
    ("TRAIN --set warmup_epochs=9", "warmup_epochs (=9) is longer than the run of 1 epochs"),
    ("TRAIN --set optimizer=lbfgs", "optimizer (='lbfgs') must be one of adabelief"),
    ("TRAIN --set optimizer=adahessian", "optimizer (='adahessian') must be one of adabelief"),
    ("TRAIN --set optimizer=fusedsgd", "optimizer (='fusedsgd') cannot be used here"),
    ("TRAIN --set image_size=1000000000000", "image_size (=1000000000000) must be at least 0 and at most 8192"),
    ("TRAIN --set crop=round", "crop (='round') must be one of resized, padded, none"),
    ("TRAIN --set crop_padding=100000", "crop_padding (=100000) must be at most 16, the side of the images"),
    ("TRAIN --set auto_augment=foo", "auto_augment (='foo') is none of timm's policies"),
    ("TRAIN --set auto_augment=rand-m1e9", "for instance 'rand-m9-mstd0.5-inc1'"),
    ("TRAIN --set auto_augment=rand-strong", "its setting 'strong' has no number"),
    ("TRAIN --set evaluation_crop=100", "evaluation_crop (=100.0) must be above 0.1 and at most 1"),
    ("TRAIN --set evaluation_crop=1e-9", "evaluation_crop (=1e-09) must be above 0.1 and at most 1"),
    ("TRAIN --set precision=float8", "precision (='float8') must be one of float32, bfloat16, float16"),
    ("TRAIN --set mixup=1 --set mix_probability=1 --batch-size 7", "batch_size (=7) must be even"),
]
DATA = [
    ("TRAIN --data {missing}", "is not there: expected 'embedded', an .npz file, a folder"),
    (f"TRAIN --data {'x' * 300}", "is not there: expected 'embedded'"),
    ("TRAIN --data {npy}", "images.npy: not a readable .npz file, as numpy.savez writes it; an .npy file has only one"),
    ("TRAIN --data {empty_npz}", "empty.npz: not a readable .npz file"),
    ("TRAIN --data {text_npz}", "text.npz: not a readable .npz file"),
    ("TRAIN --data {picture}", "picture.png: not a readable .npz file"),
    ("TRAIN --data {cut_npz}", "cut.npz: not a readable .npz file"),
    ("TRAIN --data {broken_npz}", "broken.npz: not a readable .npz file (Bad CRC-32"),
    ("TRAIN --data {foreign_npz}", "foreign.npz: x_train is no array"),
    ("TRAIN --data {pickled}", "pickled.npz: not a readable .npz file (Object arrays"),
    ("TRAIN --data {scalar_classes}", "classes have shape (); expected a list of names"),
    ("TRAIN --data {classes_2d}", "classes have shape (2, 2); expected a list of names"),
    ("TRAIN --data {few_classes}", "training labels run from 0 to 3, but there are 2 classes"),
    ("TRAIN --data {no_pixels}", "images are 0 x 0; they have no pixels"),
    ("TRAIN --data {no_images}", "there are no training images"),
    ("TRAIN --data {no_validation}", "there are no validation images"),
    ("TRAIN --data {large_label}", "the highest label is 1000000000, which would make 1000000001 classes"),
    ("TRAIN --data {negative_label}", "training labels run from -1 to 2"),
    ("TRAIN --data {float_labels}", "labels are float64 of shape (16,); expected 16 whole numbers"),
    ("TRAIN --data {float_pixels}", "images are float64 of shape (16, 16, 16, 3); expected uint8"),
    ("TRAIN --data {four_channels}", "images are uint8 of shape (16, 16, 16, 4); expected uint8"),
    ("TRAIN --data {oblong}", "is 16 x 8; the recipe keeps the images' own size"),
    ("TRAIN --data {fewer_labels}", "labels are int64 of shape (15,); expected 16 whole numbers"),
    ("TRAIN --data {no_test}", "expected x_train, y_train, x_test, y_test"),
    ("TRAIN --data {test_only}", "has no training images, only some to evaluate on"),
    ("TRAIN --data {folder}", "the folder is empty of classes; expected one folder of images for each class"),
    ("TRAIN --data {empty_classes}", "Found no valid file for the classes a, b"),
    ("TRAIN --data {few_images}", "no class has 10 images"),
    ("TRAIN --data {other_validation}", "only one of them has b, c"),
    ("TRAIN --data CIFAR10 --data-root {folder}", "CIFAR10 is not complete below"),
    ("TRAIN --data mnist --data-root {file} --download", "MNIST is not complete below"),
]
DAMAGED = [
    ("TRAIN --output {settings_missing}", "run.json"),
    ("TRAIN --output {settings_empty}", "run.json is damaged"),
    ("TRAIN --output {settings_binary}", "run.json cannot be read"),
    ("TRAIN --output {settings_list}", "run.json is damaged"),
    ("TRAIN --output {settings_folder}", "run.json cannot be read"),
    ("TRAIN --output {state_missing}", "training.pt is missing"),
    ("TRAIN --output {state_empty}", "training.pt is damaged"),
    ("TRAIN --output {state_cut}", "training.pt is damaged"),
    ("TRAIN --output {state_list}", "training.pt does not hold the state of a run"),
    ("TRAIN --output {state_folder}", "training.pt is damaged"),
    ("TRAIN --output {metrics_missing}", "metrics.jsonl is damaged or missing"),
    ("TRAIN --output {metrics_binary}", "metrics.jsonl is damaged"),
    ("TRAIN --output {metrics_list}", "line 1 of"),
    ("TRAIN --output {metrics_other}", "metrics.jsonl is damaged"),
    ("TRAIN --output {metrics_folder}", "metrics.jsonl"),
    ("TRAIN --output {report_folder}", "the run is complete, but its report cannot be written"),
    ("TRAIN --output {tensorboard_file}", "the metrics cannot be written to"),
    ("eval {settings_cut} --data {data} --workers 0", "run.json is damaged"),
    ("eval {settings_number} --data {data} --workers 0", "run.json is damaged"),
    ("eval {settings_folder} --data {data} --workers 0", "run.json cannot be read"),
    ("eval {settings_bad_crop} --data {data} --workers 0", "evaluation_crop (='x') must be of type float"),
    ("eval {settings_bad_size} --data {data} --workers 0", "image_size is 'x'"),
    ("eval {settings_zero_size} --data {data} --workers 0", "image_size is 0"),
    ("eval {settings_bad_recipe} --data {data} --workers 0", "recipe is 3"),
    ("predict {settings_without_recipe} {picture}", "it does not say 'recipe'"),
    ("predict {settings_without_classes} {picture}", "it does not say 'classes'"),
    ("predict {settings_bad_classes} {picture}", "classes is 4"),
    ("predict {settings_few_classes} {picture}", "tells 4 classes apart, but the run's settings name 1 (a)"),
    ("predict {settings_bad_interpolation} {picture}", "interpolation (='magic') must be one of"),
    ("predict {no_checkpoints} {picture}", "has no checkpoint yet: neither best nor last"),
    ("predict {dangling} {picture}", "has no checkpoint yet"),
    ("predict {plan_missing} {picture}", "plan.json cannot be read"),
    ("predict {plan_binary} {picture}", "plan.json cannot be read"),
    ("predict {plan_list} {picture}", "is not a description written by kernelwarehouse.save"),
    ("predict {plan_bad_architecture} {picture}", "zzz"),
    ("predict {plan_odd_architecture} {picture}", "architecture"),
    ("predict {plan_bad_plan} {picture}", "holds a damaged plan"),
    ("predict {plan_odd_plan} {picture}", "holds a damaged plan"),
    ("predict {weights_missing} {picture}", "cannot be read"),
    ("predict {weights_empty} {picture}", "cannot be read"),
    ("predict {weights_cut} {picture}", "cannot be read"),
    ("predict {weights_foreign} {picture}", "does not fit"),
    ("predict {weights_folder} {picture}", "cannot be read"),
]
EVAL = [
    ("eval {missing} --data {data}", "is not the folder of a run: it has no run.json"),
    ("eval {folder} --data {data}", "is not the folder of a run: it has no run.json"),
    ("eval {file} --data {data}", "is not the folder of a run: it has no run.json"),
    ("eval {run}/metrics.jsonl --data {data}", "metrics.jsonl is not the folder of a run"),
    ("eval {file}/best --data {data}", "is not the folder of a run"),
    ("eval {run}/zzz --data {data}", "is not the folder of a run"),
    ("eval {run} --data {missing}", "is not there: expected 'embedded'"),
    ("eval {run} --data {no_pixels}", "images are 0 x 0"),
    ("eval {run} --data embedded", "has 10 classes (t-shirt, trouser, pullover, ...), the network was trained for 4"),
    ("eval {run} --data {few_images}/a", "empty of classes"),
    ("eval {run} --data {data} --batch-size 0", "--batch-size (=0) must be at least 1"),
    ("eval {run} --data {data} --workers -1", "workers (=-1) must be 0"),
    ("eval {run} --data {data} --workers 300", "workers (=300) must be 0, to read in this process, or at most 256"),
    ("eval {run} --data {data} --device mps", "device 'mps' is not for training here"),
    ("eval {run} --data {data} --device meta", "device 'meta' is not for training here"),
]
PREDICT = [
    ("predict {missing} {picture}", "is not the folder of a run"),
    ("predict {file} {picture}", "is not the folder of a run"),
    ("predict {run} {missing}", "No such file"),
    ("predict {run} {folder}", "Is a directory"),
    ("predict {run} {data}", "good.npz: cannot identify image file"),
    ("predict {run} {empty_png}", "empty.png: cannot identify image file"),
    ("predict {run} {cut_png}", "cut.png: image file is truncated"),
    ("predict {run} /dev/null", "/dev/null: cannot identify image file"),
    ("predict {run} {picture} '[/red].png'", "[/red].png: [Errno 2] No such file"),
    ("predict {run} 'a\nb.png'", "a b.png: [Errno 2] No such file"),
    ("predict {run} {picture} --top 0", "--top (=0) must be at least 1"),
]
COMPARE = [
    ("compare", "nothing to compare; name presets"),
    ("compare zzz", "there is no network 'zzz'"),
    ("compare resnet18.zzz", "resnet18 has no weights tagged 'zzz'"),
    ("compare '[/red]'", "there is no network '[/red]'"),
    ("compare --backbone zzz", "no preset is built on 'zzz'; there are presets on"),
    ("compare resnet18 --image-size 0", "image_size is 0; at least 1 and at most 8,192 is wanted"),
    ("compare resnet18 --image-size 1000000", "image_size is 1000000; at least 1 and at most 8,192"),
    ("compare resnet18 --batch-size -1", "batch_size is -1; at least 1"),
    ("compare resnet18 --batch-size 100000000000", "batch_size is 100000000000; at least 1 and at most 65,536"),
    ("compare resnet18 --rounds 0", "rounds is 0; at least 1"),
    ("compare resnet18 --threads 100000", "threads is 100000; at least 1 and at most 1,024"),
    ("compare resnet18 --output {out}.pdf", "has no known form; its name must end in .txt, .md, .csv, .json"),
    ("compare resnet18 --output {folder}", "has no known form"),
    ("compare resnet18 --output {missing}/a.md", "a file name in a directory that exists is wanted"),
    ("compare resnet18 --output {file}/a.md", "cannot be written (Not a directory)"),
    ("compare resnet18 --output /proc/a.md", "/proc/a.md cannot be written"),
    ("compare resnet18 --output {pipe}", "it is a device or a pipe, and a file is wanted"),
    ("compare resnet18 --plot {out}.doc", "has no known format; its name must end in one of"),
    ("compare resnet18 --plot {missing}/a.png", "a file name in a directory that exists is wanted"),
    ("compare resnet18 --plot /proc/a.png", "/proc/a.png cannot be written"),
    ("compare resnet18 --image-size 8 --batch-size 1", "Expected more than 1 value per channel"),
    ("compare vit_tiny_patch16_224 --image-size 8 --batch-size 1", "choose another --image-size or --batch-size"),
]
# These are found out only when training has begun, and leave a folder.
BEGUN = [
    ("TRAIN --set learning_rate=1e30 --epochs 4", "A smaller learning_rate, a longer warm-up or clip_norm may help"),
    ("TRAIN --data {unreadable}", "cannot identify image file"),
    ("TRAIN --data {unreadable} --unreadable skip", "none of the 8 training images can be read"),
]
REFUSED = [*USAGE, *PLAN, *NETWORK, *OPTIONS, *RECIPE, *DATA, *DAMAGED, *EVAL, *PREDICT, *COMPARE]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_places(tmp_path_factory.mktemp("places"))


def said(command: str, places: dict[str, Path], out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command leaves on stderr, beside what it says while it measures."""
    words = shlex.split(command.replace("TRAIN", TRAIN).replace("GOOD", GOOD))
    assert main([word.format(out=out, **places) for word in words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("measuring ")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("kernelwarehouse: ")
    # These would be the texts for what nobody thought of.
    assert "--debug" not in lines[0]
    assert "cannot be read or written" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command for command, _ in REFUSED])
def test_bad_commands_are_refused(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert message in said(command, places, tmp_path / "out", capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "message"), BEGUN, ids=[command for command, _ in BEGUN])
def test_bad_runs_end(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert message in said(command, places, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "the environment has WORLD_SIZE='two'; torchrun sets it to a number"),
        ({"LOCAL_RANK": "-1"}, "the environment has LOCAL_RANK='-1'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not by torchrun"),
    ],
)
def test_bad_environments_are_refused(
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in said("TRAIN", places, tmp_path / "out", capsys)
    assert message in said("eval {run} --data {data} --workers 0", places, tmp_path / "out", capsys)
