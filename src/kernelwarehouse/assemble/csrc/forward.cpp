// Forward from cells (see ops.cpp).
#include "forward.h"

#include <torch/library.h>

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) {
  library.impl("forward_taps", &kernelwarehouse::forward_taps);
  library.impl("forward_pointwise", &kernelwarehouse::forward_pointwise);
}
