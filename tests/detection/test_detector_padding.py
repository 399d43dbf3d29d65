"""Padded batches: an image's kernels come from the image, whatever lies beside it."""

from typing import Any

import pytest
import torch
from benchmarks.padding import Change, change_by_padding
from tiny_detectors import tiny_detector
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernelwarehouse as kw
from kernelwarehouse.errors import ShapeError
from kernelwarehouse.padding import image_mean, padded_batch
from kernelwarehouse.peers import dyconv

SIZES, PADDED = [(20, 32), (32, 12)], (32, 32)


def padded_images(channels: int = 3, value: float = 0.0) -> Tensor:
    torch.manual_seed(0)
    images = torch.full((2, channels, *PADDED), value)
    for image, (height, width) in zip(images, SIZES, strict=True):
        image[:, :height, :width] = torch.rand(channels, height, width)
    return images


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_that_of_the_image_alone(dtype: torch.dtype) -> None:
    images = padded_images(value=1e3).to(dtype).requires_grad_()
    wanted = torch.stack([images[0, :, :20].mean((1, 2)), images[1, :, :, :12].mean((1, 2))])
    with padded_batch(SIZES, PADDED):
        found, last = image_mean(images), image_mean(images.permute(0, 2, 3, 1), channels_last=True)
    assert found is not None
    assert last is not None
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(last, wanted)
    [ours], [theirs] = (torch.autograd.grad(mean.square().sum(), images, retain_graph=True) for mean in (found, wanted))
    torch.testing.assert_close(ours, theirs)
    assert not ours[0, :, 20:].any()


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that was made inside, and is no view."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        storage = made.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.bytes = max(self.bytes, storage.nbytes())
        return made


@pytest.mark.parametrize("kind", ["channels first", "channels last", "channels last in memory"])
def test_the_mean_makes_no_copy_of_the_map(kind: str) -> None:
    maps = torch.rand(2, 6, *PADDED)
    wanted = torch.stack([maps[0, :, :20].mean((1, 2)), maps[1, :, :, :12].mean((1, 2))])
    if kind != "channels first":
        maps = maps.to(memory_format=torch.channels_last)
    last = kind == "channels last"
    given = maps.permute(0, 2, 3, 1) if last else maps
    with padded_batch(SIZES, PADDED), Largest(maps) as largest:
        found = image_mean(given, channels_last=last)
    assert found is not None
    torch.testing.assert_close(found, wanted)
    assert largest.bytes < maps.untyped_storage().nbytes()


def test_smaller_maps_count_a_position_that_any_pixel_of_the_image_reaches() -> None:
    maps = torch.zeros(2, 1, 4, 4)  # a position is 8 pixels wide: images end at 20 = 2.5 and 12 = 1.5 of them
    maps[0, 0, 2], maps[1, 0, :, 1] = 3.0, 8.0
    maps[0, 0, 3], maps[1, 0, :, 2:] = 100.0, 100.0
    with padded_batch(SIZES, PADDED):
        means = image_mean(maps)
    assert means is not None
    torch.testing.assert_close(means, torch.tensor([[1.0], [4.0]]))


def test_without_padding_layers_go_their_usual_way() -> None:
    images = padded_images()
    assert image_mean(images) is None
    with padded_batch([PADDED, PADDED], PADDED):
        assert image_mean(images) is None
    with padded_batch(SIZES, PADDED):
        assert image_mean(torch.zeros(2, 3)) is None
        with padded_batch([PADDED, PADDED], PADDED):
            assert image_mean(images) is None
        assert image_mean(images) is not None
    assert image_mean(images) is None


def test_sizes_that_do_not_fit_are_named() -> None:
    with (
        pytest.raises(ShapeError, match=r"40 x 12 cannot lie in a batch padded to \(32, 32\)"),
        padded_batch([(40, 12)], PADDED),
    ):
        pass
    with padded_batch(SIZES, PADDED), pytest.raises(ShapeError, match="3 samples in a padded batch of 2 images"):
        image_mean(torch.zeros(3, 3, 8, 8))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["convolution", "linear", "peer"])
def test_the_values_of_the_padding_do_not_reach_the_kernels(kind: str, training: bool) -> None:
    """A 1x1 layer mixes no positions: all that the padding could change are the kernels."""
    torch.manual_seed(1)
    layer: torch.nn.Module = kw.layers.Conv2d(3, 8, 1)
    if kind == "linear":
        layer = kw.layers.Linear(3, 8)
    elif kind == "peer":
        layer = dyconv.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 8, 1)))
    if kind != "peer":
        kw.set_temperature(layer, 0.0)
    layer.train(training)

    def inside(value: float, known: bool) -> list[Tensor]:
        images = padded_images(value=value)
        x = images.permute(0, 2, 3, 1) if kind == "linear" else images
        with torch.set_grad_enabled(training), padded_batch(SIZES if known else [PADDED] * 2, PADDED):
            out = layer(x)
        out = out.permute(0, 3, 1, 2) if kind == "linear" else out
        return [one[:, :height, :width] for one, (height, width) in zip(out, SIZES, strict=True)]

    for one, other in zip(inside(0.0, True), inside(9.0, True), strict=True):
        torch.testing.assert_close(one, other)
    different = [not torch.allclose(a, b) for a, b in zip(inside(0.0, False), inside(9.0, False), strict=True)]
    assert all(different)


def test_a_padded_batch_changes_an_image_hardly_more_than_it_does_for_static_layers() -> None:
    """What is left comes from borders: convolutions see what the layers before made of the padding."""
    torch.manual_seed(0)
    static, dynamic = (
        change_by_padding(backbone, (96, 128), {"channels": [16, 16, 16, 16], "layers": [1, 1, 1, 1]})
        for backbone in ("resnet18", "kw1x_resnet18")
    )
    assert isinstance(dynamic, Change)
    assert static.image == static.padded  # static layers do not ask
    assert dynamic.image < 1.5 * static.image
    assert dynamic.padded > 2 * dynamic.image


def test_a_detector_tells_its_backbone_what_is_image() -> None:
    detector = tiny_detector("kw1x_resnet18").eval()
    kw.set_temperature(detector, 0.0)
    seen = []
    detector.backbone.register_forward_pre_hook(lambda module, given: seen.append(given))
    with torch.no_grad():
        detector([torch.rand(3, 64, 96), torch.rand(3, 96, 64)])
    [(batch, sizes)] = seen
    assert tuple(batch.shape) == (2, 3, 96, 96)
    assert [tuple(size) for size in sizes] == [(64, 96), (96, 64)]
