// Forward from bases that are kept (see ops.cpp).
#include <torch/library.h>

#include "forward.h"

TORCH_LIBRARY_FRAGMENT(kernelwarehouse, library) {
  library.def(
      "forward_taps_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? steps, Tensor targets, "
      "int padded_places, Tensor places, Tensor shifts, bool channels_last) -> Tensor",
      &kernelwarehouse::forward_taps_basis);
  library.def("forward_pointwise_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? steps) -> Tensor",
              &kernelwarehouse::forward_pointwise_basis);
}
