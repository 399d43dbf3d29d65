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
//
// Operators are registered in several files, which compilers work on side by side.

#include <torch/library.h>

#include "attention.h"
#include "depthwise.h"
#include "streaming.h"

namespace kernelwarehouse {

// Whether very few and few rows are mixed across lines; asked for either, it is so from then on.
std::tuple<bool, bool> mixes_across(std::optional<bool> very_few, std::optional<bool> few) {
  Ways& chosen = ways();
  chosen = {very_few.value_or(chosen.very_few_across), few.value_or(chosen.few_across)};
  return {chosen.very_few_across, chosen.few_across};
}

}  // namespace kernelwarehouse

TORCH_LIBRARY(kernelwarehouse, library) {
  library.def("lanes() -> int", [] { return kernelwarehouse::kLanes; });  // numbers in a vector
  library.def("mixes_across(bool? very_few=None, bool? few=None) -> (bool, bool)", &kernelwarehouse::mixes_across);
  library.def(
      "attention(Tensor x, Tensor fc1, Tensor norm_weight, Tensor norm_bias, Tensor mean, Tensor variance, "
      "float norm_epsilon, Tensor fc2, Tensor fc2_bias, int mixtures, Tensor? beta, float tau, float epsilon) -> "
      "Tensor",
      &kernelwarehouse::attention);
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
