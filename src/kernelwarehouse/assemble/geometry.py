"""The fixed facts of one layer that evaluating it needs."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from kernelwarehouse.partition import Partition


@dataclass(frozen=True)
class Tap:
    """One position of a kernel."""

    reach: tuple[int, ...]  # how far from the first position it looks, on every axis
    position: int  # among the mixtures
    inner: int  # inside a cell (0 where the cells are one position wide)


@dataclass(frozen=True)
class Geometry:
    """A kernel's partition and how it slides over the input.

    Padding is symmetric and of zeros; layers pad by themselves where it is anything else. A linear layer has no
    spatial axes: its tuples are empty and its input is `[batch, tokens, in]`, where a convolution's is
    `[batch, in, *space]`.
    """

    partition: Partition
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        # Fill the caches now: torch.compile cannot follow the lock that guards the first use of a cached property.
        for facts in (self.partition, self):
            for name, value in vars(type(facts)).items():
                if isinstance(value, cached_property):
                    getattr(facts, name)

    # A geometry is looked up, and asked for these, several times in every call of a layer.
    @cached_property
    def _hash(self) -> int:
        return hash((self.partition, self.stride, self.padding, self.dilation, self.groups))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def kernel_size(self) -> tuple[int, ...]:
        return self.partition.kernel_shape[2:]

    @cached_property
    def spatial_axes(self) -> int:
        return len(self.kernel_size)

    @cached_property
    def out_channels(self) -> int:
        return self.partition.kernel_shape[0]

    @cached_property
    def in_channels(self) -> int:
        return self.partition.kernel_shape[1] * self.groups

    @cached_property
    def smallest_input(self) -> tuple[int, ...]:
        """Spatial size of the smallest input that the kernel fits into, padding included."""
        axes = zip(self.kernel_size, self.dilation, self.padding, strict=True)
        return tuple(dilation * (kernel - 1) + 1 - 2 * pad for kernel, dilation, pad in axes)

    @cached_property
    def taps(self) -> tuple[Tap, ...]:
        """All positions of the kernel, the last axis fastest; a linear layer has one."""
        return tuple(map(self._tap, product(*map(range, self.kernel_size))))

    def _tap(self, place: tuple[int, ...]) -> Tap:
        position = inner = 0
        for at, count, width in zip(place, self.partition.counts[2:], self.partition.cell_shape[2:], strict=True):
            position, inner = position * count + at // width, inner * width + at % width
        return Tap(tuple(at * step for at, step in zip(place, self.dilation, strict=True)), position, inner)

    def window(self, tap: Tap, out_size: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the padded input that a kernel position sees."""
        axes = zip(tap.reach, self.stride, out_size, strict=True)
        return tuple(slice(start, start + (size - 1) * stride + 1, stride) for start, stride, size in axes)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The padding before and after each axis, the last axis first, as torch wants it."""
        return tuple(edge for pad in reversed(self.padding) for edge in (pad, pad))

    def output_size(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial size of the output for an input of size `space` (a linear layer's tokens are not spatial: empty)."""
        return _output_size(self, space)


def sliding_size(geometry: Geometry, space: tuple[int, ...]) -> tuple[int, ...]:
    """What `Geometry.output_size` gives, also for sizes that a compiler has left open (they cannot be looked up)."""
    axes = zip(geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation, space, strict=False)
    return tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for kernel, stride, pad, dilation, size in axes
    )


_output_size = lru_cache(maxsize=4096)(sliding_size)


@lru_cache(maxsize=4096)
def looks_at_padding_alone(geometry: Geometry, space: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The slices of a kernel, as axis and place, that meet nothing of an input of this size wherever the kernel is."""
    found = []
    for axis, (size, steps) in enumerate(zip(space, geometry.output_size(space), strict=True)):
        stride, pad, dilation = geometry.stride[axis], geometry.padding[axis], geometry.dilation[axis]
        for place in range(geometry.kernel_size[axis]):
            first = place * dilation - pad
            if not any(0 <= first + step * stride < size for step in range(steps)):
                found.append((axis, place))
    return tuple(found)
