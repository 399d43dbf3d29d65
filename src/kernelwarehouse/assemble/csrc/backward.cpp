// Backward (see ops.cpp).
#include "backward.h"

#include <torch/library.h>

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) { library.impl("backward_taps", &kernelwarehouse::backward_taps); }
