// Forward of 3x3 kernels by Winograd's transform (see ops.cpp).
#include "winograd_forward.h"

#include <torch/library.h>

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) {
  library.impl("forward_winograd", &kernelwarehouse::forward_winograd);
  library.impl("forward_winograd_basis", &kernelwarehouse::forward_winograd_basis);
}
