// Mixing cells and applying the mixtures in one go, on the CPU, in float32.
//
// No whole assembled kernel reaches memory: a block of output channels is mixed into a buffer that stays in cache and
// is multiplied at once. Backward mixes the same blocks again.
//
// Names follow the Python side. A layer has `taps` kernel positions; its kernel is cut into out_groups x in_groups
// cells of cell_out x cell_in numbers at every tap, so a sample's kernel consists of out_groups * segments mixtures,
// where segments = taps * in_groups. Attentions come as [batch, out_groups, taps * in_groups, n]. Cell sizes are
// multiples of 8. For kernels of several taps, activations are laid out as "rows": channels last and padded in space,
// so that output position p reads, at tap t, the row places[p] + shifts[t], whatever stride, dilation and number of
// axes the layer has.

#include <torch/library.h>

#include "attention.h"
#include "backward.h"
#include "depthwise.h"
#include "forward.h"

TORCH_LIBRARY(kernelwarehouse, library) {
  library.def("lanes() -> int", [] { return kernelwarehouse::kLanes; });  // numbers in a vector
  library.def(
      "forward_taps(Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, Tensor places, "
      "Tensor shifts, bool channels_last) -> Tensor",
      &kernelwarehouse::forward_taps);
  library.def("forward_pointwise(Tensor x, Tensor attention, Tensor cells) -> Tensor",
              &kernelwarehouse::forward_pointwise);
  library.def(
      "backward_taps(Tensor grad, Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, "
      "Tensor places, Tensor shifts, bool dense, bool wants_input) -> (Tensor, Tensor, Tensor)",
      &kernelwarehouse::backward_taps);
  library.def(
      "attention(Tensor x, Tensor fc1, Tensor norm_weight, Tensor norm_bias, Tensor mean, Tensor variance, "
      "float norm_epsilon, Tensor fc2, Tensor fc2_bias, int mixtures, Tensor? beta, float tau, float epsilon) -> "
      "Tensor",
      &kernelwarehouse::attention);
  library.def(
      "forward_taps_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? steps, Tensor targets, "
      "int padded_places, Tensor places, Tensor shifts, bool channels_last) -> Tensor",
      &kernelwarehouse::forward_taps_basis);
  library.def("forward_pointwise_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? steps) -> Tensor",
              &kernelwarehouse::forward_pointwise_basis);
  library.def(
      "attention_coefficients(Tensor x, Tensor fc1, Tensor norm_weight, Tensor norm_bias, Tensor mean, "
      "Tensor variance, float norm_epsilon, Tensor fc2, Tensor fc2_bias, int mixtures, float epsilon) -> (Tensor, "
      "Tensor)",
      &kernelwarehouse::attention_coefficients);
  library.def(
      "forward_depthwise(Tensor x, Tensor attention, Tensor cells, int[] out_size, int[] padding, int[] dilation, "
      "int[] stride) -> Tensor",
      &kernelwarehouse::forward_depthwise);
  library.def(
      "depthwise_kernel_gradient(Tensor grad, Tensor x, int cell, int[] padding, int[] dilation, int[] stride) -> "
      "Tensor",
      &kernelwarehouse::depthwise_kernel_gradient);
}
