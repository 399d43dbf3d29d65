// Forward from cells (see ops.cpp).
#include <torch/library.h>

#include "forward.h"

TORCH_LIBRARY_FRAGMENT(kernelwarehouse, library) {
  library.def(
      "forward_taps(Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, Tensor places, "
      "Tensor shifts, bool channels_last) -> Tensor",
      &kernelwarehouse::forward_taps);
  library.def("forward_pointwise(Tensor x, Tensor attention, Tensor cells) -> Tensor",
              &kernelwarehouse::forward_pointwise);
}
