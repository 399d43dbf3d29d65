import pytest
import torch
from per_sample import convolve_each
from torch import nn

from kernelwarehouse.peers import _conv
from kernelwarehouse.peers._conv import convolve, geometry_of
from kernelwarehouse.peers.cgc import CGConv2d
from kernelwarehouse.peers.condconv import CondConv2d, RoutedBlock
from kernelwarehouse.peers.odconv import ODConv2d


@pytest.mark.parametrize("at_once", [1, 700, 1 << 20])  # one sample, three samples, all samples of 216 numbers
def test_kernels_made_in_parts_are_the_same_in_both_directions(at_once, monkeypatch):
    monkeypatch.setattr(_conv, "KERNEL_NUMBERS_AT_ONCE", at_once)
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
    scales = torch.rand(5, 6, dtype=torch.float64)
    x = torch.randn(5, 4, 7, 7, dtype=torch.float64)
    results = []
    for evaluate in (
        lambda x, scales, make: convolve(x, make, (scales,), geometry_of(conv)),
        lambda x, scales, make: convolve_each(x, make(scales), conv),
    ):
        inputs = [x.clone().requires_grad_(), scales.clone().requires_grad_()]
        out = evaluate(*inputs, lambda scales: conv.weight * scales[:, :, None, None, None])
        conv.weight.grad = None
        out.square().sum().backward()
        results.append([out, conv.weight.grad, *(value.grad for value in inputs)])
    torch.testing.assert_close(results[0], results[1])


def test_no_kernel_is_kept_for_backward():
    conv = nn.Conv2d(32, 32, 3, bias=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda t: t):
        convolve(
            torch.randn(8, 32, 3, 3, requires_grad=True),
            lambda scales: conv.weight * scales[:, :, None, None, None],
            (torch.rand(8, 32),),
            geometry_of(conv),
        )
    assert max(saved, default=0) <= conv.weight.numel()


def test_an_empty_batch_keeps_its_gradients():
    conv = nn.Conv2d(4, 6, 3, bias=False)
    scales = torch.rand(0, 6, requires_grad=True)
    make = lambda scales: conv.weight * scales[:, :, None, None, None]  # noqa: E731
    out = convolve(torch.randn(0, 4, 5, 5), make, (scales,), geometry_of(conv))
    out.sum().backward()
    assert out.shape == (0, 6, 3, 3)
    assert (conv.weight.grad == 0).all()


@pytest.mark.parametrize(
    "make",
    [ODConv2d, CGConv2d, lambda conv: RoutedBlock(nn.Sequential(CondConv2d(conv)), 16)],
    ids=["od", "cgc", "cond"],
)
def test_compilers_see_one_graph(make):
    layer = make(nn.Conv2d(16, 16, 3)).eval()
    x = torch.randn(2, 16, 6, 6)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
