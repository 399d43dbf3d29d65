// Mixing cells and applying the mixtures in one go, on the CPU, in float32.
//
// No whole assembled kernel reaches memory: a block of output channels is mixed into a buffer that stays in cache and
// is multiplied at once. Backward mixes the same blocks again.
//
// Names follow the Python side. A layer has `taps` kernel positions; its kernel is cut into out_groups x in_groups
// cells of cell_out x cell_in numbers at every tap, so a sample's kernel consists of out_groups * segments mixtures,
// where segments = taps * in_groups. Attentions come as [batch, out_groups, taps * in_groups, n]. Cell sizes are
// multiples of 8. In forward_taps and what goes with it, activations are laid out as "rows": channels last and padded
// in space, so that output position p reads, at tap t, the row places[p] + shifts[t], whatever stride, dilation and
// number of axes the layer has.
//
// Here is what operators there are; implementations for the CPU stand in several files, which compilers work on side by
// side. One for another device would be registered likewise, under its own name.

#include <torch/library.h>

#include "attention.h"
#include "checks.h"
#include "depthwise_backward.h"
#include "streaming.h"

namespace kernelwarehouse {

// How very few and few rows are mixed; asked for other ways, it is by them from then on.
std::tuple<Int, Int> ways_of_mixing(std::optional<Int> very_few, std::optional<Int> few) {
  Ways& chosen = ways();
  const auto changed = [](Way way, std::optional<Int> wanted) {
    if (!wanted) return way;
    TORCH_CHECK_VALUE(*wanted >= 0 && *wanted < kWays, "a way to mix is ", *wanted, "; 0 to ", kWays - 1, " are wanted");
    return Way(*wanted);
  };
  chosen = {changed(chosen.very_few, very_few), changed(chosen.few, few)};
  return {Int(chosen.very_few), Int(chosen.few)};
}

}  // namespace kernelwarehouse

TORCH_LIBRARY(kernelwarehouse, library) {
  // Of the machine.
  library.def("lanes() -> int", [] { return kernelwarehouse::kLanes; });       // numbers in a vector
  library.def("panel_width() -> int", [] { return kernelwarehouse::kWide; });  // output channels of a panel
  library.def("ways_of_mixing(int? very_few=None, int? few=None) -> (int, int)", &kernelwarehouse::ways_of_mixing);
  // The attention branch: attention.h.
  library.def(
      "attention(Tensor x, Tensor fc1, Tensor norm_weight, Tensor norm_bias, Tensor mean, Tensor variance, "
      "float norm_epsilon, Tensor fc2, Tensor fc2_bias, int mixtures, Tensor? beta, Tensor temperature, "
      "float temperature_unit, float epsilon) -> Tensor");
  library.def(
      "attention_coefficients(Tensor x, Tensor fc1, Tensor norm_weight, Tensor norm_bias, Tensor mean, "
      "Tensor variance, float norm_epsilon, Tensor fc2, Tensor fc2_bias, int mixtures, float epsilon) -> (Tensor, "
      "Tensor)");
  // Depth-wise layers: depthwise.h, depthwise_backward.h.
  library.def(
      "forward_depthwise(Tensor x, Tensor attention, Tensor cells, int[2] out_size, int[2] padding, int[2] dilation, "
      "int[2] stride) -> Tensor");
  library.def(
      "depthwise_kernel_gradient(Tensor grad, Tensor x, int cell, int[2] padding, int[2] dilation, int[2] stride) -> "
      "Tensor");
  library.def(
      "depthwise_input_gradient(Tensor grad, Tensor attention, Tensor cells, int channels, int[2] size, "
      "int[2] padding, int[2] dilation, int[2] stride) -> Tensor");
  // Others, from cells and from bases that are kept: forward.h, backward_taps.h, backward_planes.h.
  library.def(
      "forward_taps(Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, Tensor places, "
      "Tensor shifts, bool channels_last) -> Tensor");
  library.def("forward_pointwise(Tensor x, Tensor attention, Tensor cells) -> Tensor");
  library.def(
      "forward_taps_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? low, Tensor? steps, "
      "Tensor targets, int padded_places, Tensor places, Tensor shifts, bool channels_last) -> Tensor");
  library.def(
      "forward_pointwise_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? low, Tensor? steps) -> "
      "Tensor");
  library.def(
      "backward_taps(Tensor grad, Tensor x, Tensor attention, Tensor cells, Tensor targets, int padded_places, "
      "Tensor places, Tensor shifts, bool dense, bool wants_input, Tensor(a!)? total=None) -> (Tensor, Tensor, "
      "Tensor)");
  library.def(
      "backward_planes(Tensor grad, Tensor x, Tensor attention, Tensor cells, bool wants_input, "
      "Tensor(a!)? total=None) -> (Tensor, Tensor, Tensor)");
  // 3x3 at stride 1 by Winograd's transform: winograd_forward.h, winograd_backward.h.
  library.def(
      "forward_winograd(Tensor x, Tensor attention, Tensor cells, int[2] padding, bool channels_last) -> Tensor");
  library.def(
      "forward_winograd_basis(Tensor x, Tensor hidden, Tensor scale, Tensor basis, Tensor? low, Tensor? steps, "
      "int[2] padding, bool channels_last) -> Tensor");
  library.def(
      "backward_winograd(Tensor grad, Tensor x, Tensor attention, Tensor cells, int[2] padding, bool wants_input, "
      "Tensor(a!)? total=None) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(kernelwarehouse, CPU, library) {
  library.impl("attention", &kernelwarehouse::attention);
  library.impl("attention_coefficients", &kernelwarehouse::attention_coefficients);
  library.impl("forward_depthwise", &kernelwarehouse::forward_depthwise);
  library.impl("depthwise_kernel_gradient", &kernelwarehouse::depthwise_kernel_gradient);
  library.impl("depthwise_input_gradient", &kernelwarehouse::depthwise_input_gradient);
}
