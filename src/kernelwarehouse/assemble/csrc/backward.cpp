// Backward (see ops.cpp).
#include <torch/library.h>

#include "backward.h"

TORCH_LIBRARY_FRAGMENT(kernelwarehouse, library) {
  library.def(
      "backward_taps(Tensor grad, Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, "
      "Tensor places, Tensor shifts, bool dense, bool wants_input, Tensor(a!)? total=None) -> (Tensor, Tensor, Tensor)",
      &kernelwarehouse::backward_taps);
}
