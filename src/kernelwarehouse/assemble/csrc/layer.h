// The facts of one call that all loops share, and mixing, which forward and backward have in common.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "tiles.h"

namespace kernelwarehouse {

using at::Tensor;

// Floats. The first is what stays in a usual second-level cache next to other data, the second what stays in a third
// level, and below what an allocator maps anew on every call.
constexpr Int kNearCache = 48 * 1024;
constexpr Int kFarCache = 768 * 1024;

struct Layer {
  Int batch, out_groups, segments, n;  // segments = taps * in_groups
  Int cell_out, cell_in;

  // attention [batch, out_groups, segments, n], cells [n, cell_out, cell_in]
  Layer(const Tensor& attention, const Tensor& cells)
      : batch(attention.size(0)),
        out_groups(attention.size(1)),
        segments(attention.size(2)),
        n(attention.size(3)),
        cell_out(cells.size(1)),
        cell_in(cells.size(2)) {}

  Int cell() const { return cell_out * cell_in; }
  Int out_channels() const { return out_groups * cell_out; }
  Int pairs() const { return batch * out_groups; }  // (sample, output group): each has `segments` mixtures of its own
};

// Mixes the numbers [first, first + columns) of the cells: to[row][column] for `rows` attentions of n numbers. The cells
// are packed piece by piece, so that a piece stays near while all rows use it.
inline void mix(const Layer& layer, const float* attention, Int rows, const float* cells, Int first, Int columns, float* to,
                Int to_pitch, std::vector<float>& packed) {
  const Int piece = std::max<Int>(kWide, kFarCache / 4 / layer.n / kWide * kWide);
  packed.resize(layer.n * std::min(piece, columns));
  for (Int column = 0; column < columns; column += piece) {
    const Int count = std::min(piece, columns - column);
    pack_panels(cells + first + column, layer.cell(), layer.n, count, packed.data());
    multiply_packed(attention, layer.n, rows, layer.n, packed.data(), count, to + column, to_pitch);
  }
}

// Steps from the row of an output position to what each segment (tap, input group) reads.
inline std::vector<Int> segment_steps(const Tensor& shifts, Int pitch, const Layer& layer) {
  const Int in_groups = layer.segments / shifts.numel();
  std::vector<Int> steps;
  for (Int tap = 0; tap < shifts.numel(); ++tap)
    for (Int group = 0; group < in_groups; ++group)
      steps.push_back(shifts.const_data_ptr<Int>()[tap] * pitch + group * layer.cell_in);
  return steps;
}

// Channels of a row and a gap: a pitch that is a power of two would map all rows to few cache sets.
inline Int row_pitch(Int channels) { return round_up(channels, kWide) + kWide; }

// One sample [channels, places] (or [places, channels] with channels_last) -> rows, where row targets[place] holds the
// channels of a place. Other rows, the padding, are left alone.
inline void sample_to_rows(const float* x, bool channels_last, Int channels, const Int* targets, Int places, float* rows,
                           Int pitch, std::vector<float>& turned) {
  turned.resize(kWide * pitch);
  for (Int place = 0; place < places; place += kWide) {
    const Int count = std::min(kWide, places - place);
    if (!channels_last) transpose(x + place, places, channels, count, turned.data(), pitch);
    for (Int i = 0; i < count; ++i)
      std::memcpy(rows + targets[place + i] * pitch,
                  channels_last ? x + (place + i) * channels : turned.data() + i * pitch, channels * sizeof(float));
  }
}

}  // namespace kernelwarehouse
