// Backward (see ops.cpp).
#include <torch/library.h>

#include "backward_planes.h"
#include "backward_taps.h"
#include "winograd_backward.h"

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) {
  library.impl("backward_planes", &kernelwarehouse::backward_planes);
  library.impl("backward_taps", &kernelwarehouse::backward_taps);
  library.impl("backward_winograd", &kernelwarehouse::backward_winograd);
}
