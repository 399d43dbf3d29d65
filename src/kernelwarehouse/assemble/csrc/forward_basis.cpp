// Forward from bases that are kept (see ops.cpp).
#include <torch/library.h>

#include "forward.h"

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) {
  library.impl("forward_taps_basis", &kernelwarehouse::forward_taps_basis);
  library.impl("forward_pointwise_basis", &kernelwarehouse::forward_pointwise_basis);
}
