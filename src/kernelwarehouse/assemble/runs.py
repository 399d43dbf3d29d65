"""The input of a layer laid out so that what each kernel position sees is a run of it: nothing is copied for any."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kernelwarehouse.assemble.geometry import Geometry, Tap
from kernelwarehouse.assemble.layout import channels_last, laid_out, new_images
from kernelwarehouse.shared_gradient import sum_dtype


@dataclass(frozen=True)
class Run:
    """One position of the kernel: the run of the input that it sees, and where its numbers come from."""

    phase: tuple[int, ...]
    places: slice
    position: int  # among the mixtures
    inner: int  # inside a cell


class Runs:
    """The padded input as `[batch, in, places]`: a row of it after the other.

    Outputs are computed as if they had as many columns as the input has; `narrow` cuts the surplus off. With a stride,
    places whose distance is no multiple of it are kept apart, in phases. The tokens of a linear layer are one row.
    """

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        self.x, self.geometry, self.linear = x, geometry, geometry.spatial_axes == 0
        self.last = not self.linear and channels_last(x)
        self.out_size = (x.shape[1],) if self.linear else geometry.output_size(tuple(x.shape[2:]))
        self.size = self.out_size if self.linear else self._phase_size()
        self._pitches = [math.prod(self.size[axis + 1 :]) for axis in range(len(self.size))]
        self.length = sum((size - 1) * pitch for size, pitch in zip(self.out_size, self._pitches, strict=True)) + 1
        self._edges = self._around()
        self.runs = [self._run(tap) for tap in geometry.taps]
        padded = self._pad(x.transpose(1, 2) if self.linear else x, self._edges)
        self.phases = {phase: self._pick(padded, phase).flatten(2) for phase in {run.phase for run in self.runs}}

    def _phase_size(self) -> tuple[int, ...]:
        """The outputs, and what the kernel reaches further."""
        geometry = self.geometry
        axes = zip(self.out_size, geometry.kernel_size, geometry.dilation, geometry.stride, strict=True)
        return tuple(out + dilation * (kernel - 1) // stride for out, kernel, dilation, stride in axes)

    def _around(self) -> list[int]:
        """What is added before and after each axis, last axis first (negative: cut off)."""
        geometry, edges = self.geometry, []
        for space, pad, stride, size in zip(
            self.x.shape[2:], geometry.padding, geometry.stride, self.size, strict=False
        ):
            edges += [stride * size - space - pad, pad]
        return edges[::-1]

    @staticmethod
    def _pad(x: Tensor, edges: list[int]) -> Tensor:
        return F.pad(x, edges) if any(edges) else x

    def _run(self, tap: Tap) -> Run:
        axes = [divmod(reach, stride) for reach, stride in zip(tap.reach, self.geometry.stride, strict=True)]
        start = sum(steps * pitch for (steps, _), pitch in zip(axes, self._pitches, strict=False))
        places = slice(start, start + self.length)
        return Run(tuple(rest for _, rest in axes), places, tap.position, tap.inner)

    def _pick(self, padded: Tensor, phase: tuple[int, ...]) -> Tensor:
        steps = zip(phase, self.geometry.stride, strict=True)
        return padded[(slice(None), slice(None), *(slice(start, None, stride) for start, stride in steps))]

    def new_output(self) -> Tensor:
        """Zeros to add up in, `[batch, out, places]`."""
        shape = self.x.shape[0], self.geometry.out_channels, self.out_size[0] * self._pitches[0]
        return self.x.new_zeros(shape, dtype=sum_dtype(self.x.dtype))

    def narrow(self, out: Tensor) -> Tensor:
        """The output of the layer from that with surplus columns."""
        out = out.unflatten(2, (self.out_size[0], *self.size[1:]))
        out = out[(slice(None), slice(None), *(slice(size) for size in self.out_size))]
        if self.linear:
            return out.transpose(1, 2).contiguous()
        return laid_out(out, self.last)

    def widen(self, grad: Tensor) -> Tensor:
        """The other way round, with zeros in the surplus columns."""
        grad = (grad.transpose(1, 2) if self.linear else grad).contiguous()
        surplus = [edge for size, out in zip(self.size[1:], self.out_size[1:], strict=True) for edge in (size - out, 0)]
        return self._pad(grad, surplus[::-1]).flatten(2)[..., : self.length]

    def join(self, phases: dict[tuple[int, ...], Tensor]) -> Tensor:
        """The gradient of the input from those of its phases."""
        if self.linear:
            return phases[()].transpose(1, 2).to(self.x.dtype)
        sizes = [size * stride for size, stride in zip(self.size, self.geometry.stride, strict=True)]
        padded = new_images(self.x, self.x.shape[1], tuple(sizes), self.last).zero_()
        for phase, grad in phases.items():
            self._pick(padded, phase).copy_(grad.unflatten(2, self.size))
        return self._pad(padded, [-edge for edge in self._edges])
