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

// Floats: what stays in a usual second-level cache next to other data, what stays in a share of the third level, and the
// kernels that exist at a time. The last is a compromise: mixing wants many samples at a time, so that packing the cells
// pays, but an allocator maps blocks of more than 32 MB anew on every call.
constexpr Int kNearCache = 48 * 1024;
constexpr Int kFarCache = 768 * 1024;
constexpr Int kBlock = 2 * 1024 * 1024;

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

// Few rows: nothing is packed, the cells stream from memory once. to[row] += attention[row] x cells, K cells at a time,
// so that a sum is loaded and stored once for K products.
template <int K>
inline void add_streamed(const float* attention, Int rows, Int n, const float* cells, Int pitch, Int columns, float* to,
                         Int to_pitch) {
  for_panels(columns, [&](Int column, auto vectors) {
    Lanes numbers[K][vectors];
    for (int k = 0; k < K; ++k)
      for (int v = 0; v < vectors; ++v) numbers[k][v] = load(cells + k * pitch + column + v * kLanes);
    for (Int row = 0; row < rows; ++row) {
      const float* weights = attention + row * n;
      float* target = to + row * to_pitch + column;
      for (int v = 0; v < vectors; ++v) {
        Lanes sum = load(target + v * kLanes);
        for (int k = 0; k < K; ++k) sum += weights[k] * numbers[k][v];
        store(target + v * kLanes, sum);
      }
    }
  });
}

// Mixes the numbers [first, first + columns) of the cells: to[row][column] for `rows` attentions of n numbers.
inline void mix(const Layer& layer, const float* attention, Int rows, const float* cells, Int first, Int columns, float* to,
                Int to_pitch, std::vector<float>& packed) {
  constexpr Int few = 12, stream = 1024, together = 4;
  if (rows <= few) {
    for (Int column = 0; column < columns; column += stream) {
      const Int count = std::min(stream, columns - column);
      const float* from = cells + first + column;
      for (Int row = 0; row < rows; ++row) std::fill_n(to + row * to_pitch + column, count, 0.0f);
      Int j = 0;
      for (; j + together <= layer.n; j += together)
        add_streamed<together>(attention + j, rows, layer.n, from + j * layer.cell(), layer.cell(), count, to + column,
                               to_pitch);
      for (; j < layer.n; ++j)
        add_streamed<1>(attention + j, rows, layer.n, from + j * layer.cell(), layer.cell(), count, to + column, to_pitch);
    }
    return;
  }
  // Many rows: the cells are packed piece by piece, so that a piece stays near while all rows use it.
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
