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
  Int batch, out_groups, segments, n;  // segments = taps * in_groups; n cells, or units of the hidden vector
  Int cell_out, cell_in;

  Int cell() const { return cell_out * cell_in; }
  Int out_channels() const { return out_groups * cell_out; }
  Int pairs() const { return batch * out_groups; }  // (sample, output group): each has `segments` mixtures of its own
};

// Few rows: nothing is packed, the kernels stream from memory once. to[row] (+)= sum over K of weights[row][k] * lines[k],
// so that a sum is loaded and stored once for K products.
template <int K, bool Add>
inline void stream_lines(const float* weights, Int weights_pitch, Int rows, const float* const* lines, Int columns, float* to,
                         Int to_pitch) {
  for_panels(columns, [&](Int column, auto vectors) {
    Lanes numbers[K][vectors];
    for (int k = 0; k < K; ++k)
      for (int v = 0; v < vectors; ++v) numbers[k][v] = load(lines[k] + column + v * kLanes);
    const float* weight = weights;
    float* target = to + column;
    for (Int row = 0; row < rows; ++row, weight += weights_pitch, target += to_pitch)
      for (int v = 0; v < vectors; ++v) {
        Lanes sum = Add ? load(target + v * kLanes) : Lanes{};
        for (int k = 0; k < K; ++k) sum += weight[k] * numbers[k][v];
        store(target + v * kLanes, sum);
      }
  });
}

// to[row][column] = sum over k of weights[row][k] * lines[k][column].
inline void mix_streamed(const float* weights, Int rows, const std::vector<const float*>& lines, Int columns, float* to,
                         Int to_pitch) {
  constexpr Int stream = 4096, together = 4;  // columns and lines at a time: the sums stay near, and reading runs on
  const Int depth = static_cast<Int>(lines.size());
  if (depth == 0)
    for (Int row = 0; row < rows; ++row) std::fill_n(to + row * to_pitch, columns, 0.0f);
  for (Int column = 0; column < columns; column += stream) {
    const Int count = std::min(stream, columns - column);
    for (Int k = 0; k < depth;) {
      const bool whole = k + together <= depth;
      const float* from[together];
      for (Int i = 0; i < (whole ? together : 1); ++i) from[i] = lines[k + i] + column;
      const auto add = whole ? (k == 0 ? stream_lines<together, false> : stream_lines<together, true>)
                             : (k == 0 ? stream_lines<1, false> : stream_lines<1, true>);
      add(weights + k, depth, rows, from, count, to + column, to_pitch);
      k += whole ? together : 1;
    }
  }
}

// What was packed last: several runs of samples use the same piece of the cells, one after the other.
struct Packed {
  std::vector<float> numbers;
  const float* from = nullptr;
  Int columns = 0;
};

// Columns that are packed at a time: a piece that stays in cache.
inline Int packed_columns(Int depth) { return std::max<Int>(kWide, kFarCache / 4 / depth / kWide * kWide); }

// to[row][column] = sum over k of weights[row][k] * from[k][column], for any number of rows; from[k], from[k + 1] are
// `pitch` apart.
inline void mix(const float* weights, Int rows, Int depth, const float* from, Int pitch, Int columns, float* to, Int to_pitch,
                Packed& packed) {
  // Packing costs a copy, which more rows pay for. Cells that stay in cache are packed in small pieces, which the rows then
  // find nearest; cells that come from memory in pieces long enough to be read at its full speed.
  constexpr Int some = 64, short_piece = 256;
  const bool near = depth * pitch <= 4 * kFarCache;
  if (rows <= (near ? 7 : 12)) {
    std::vector<const float*> lines(depth);
    for (Int k = 0; k < depth; ++k) lines[k] = from + k * pitch;
    return mix_streamed(weights, rows, lines, columns, to, to_pitch);
  }
  const Int piece = near && rows <= some ? std::min(short_piece, packed_columns(depth)) : packed_columns(depth);
  packed.numbers.resize(depth * piece);
  for (Int column = 0; column < columns; column += piece) {
    const Int count = std::min(piece, columns - column);
    if (packed.from != from + column || packed.columns != count) {
      pack_panels(from + column, pitch, depth, count, packed.numbers.data());
      packed.from = from + column;
      packed.columns = count;
    }
    multiply_packed(weights, depth, rows, depth, packed.numbers.data(), count, to + column, to_pitch);
  }
}

// The two ways to mix the kernels of `count` pairs from `pair` on, for the columns [first, first + columns) of a cell:
// to[pair][segment][column], segments `pitch` apart.

// From cells: attention [pairs][segments][n] x cells [n][cell]. Mixtures are [channels][cell_in] like the cells; or, with
// `turned` cells (see turn_cells), [cell_in][channels] for a block of kWide channels.
struct CellMixer {
  const Layer& layer;
  const float* attention;
  const float* cells;
  bool turned = false;

  void operator()(Int pair, Int count, Int first, Int columns, float* to, Int pitch, Packed& packed) const {
    const float* from = turned ? cells + first * layer.n : cells + first;
    mix(attention + pair * layer.segments * layer.n, count * layer.segments, layer.n, from, turned ? columns : layer.cell(),
        columns, to, pitch, packed);
  }

  CellMixer from_sample(Int sample) const {
    return {layer, attention + sample * layer.out_groups * layer.segments * layer.n, cells, turned};
  }
};

// Cells [n][cell_out][cell_in] -> [block of kWide output channels][n][cell_in][channels of the block].
inline Tensor turn_cells(const Layer& layer, const Tensor& cells) {
  Tensor turned = at::empty_like(cells);
  const float* from = cells.const_data_ptr<float>();
  float* to = turned.mutable_data_ptr<float>();
  at::parallel_for(0, (layer.cell_out + kWide - 1) / kWide, 1, [&](Int begin, Int end) {
    for (Int first = begin * kWide; first < std::min(end * kWide, layer.cell_out); first += kWide) {
      const Int width = std::min(kWide, layer.cell_out - first), block = first * layer.cell_in;
      for (Int j = 0; j < layer.n; ++j)
        transpose(from + j * layer.cell() + block, layer.cell_in, width, layer.cell_in,
                  to + block * layer.n + j * width * layer.cell_in, width);
    }
  });
  return turned;
}

// From bases, of which every mixture has its own: scale [pairs][segments] * (hidden [batch][n] x basis [out_groups][segments]
// [n][cell]). Units of the hidden vector that are 0 in all samples, as a ReLU leaves many, cost nothing.
struct BasisMixer {
  const Layer& layer;
  const float* hidden;
  const float* scale;
  const float* basis;
  static constexpr bool turned = false;

  void operator()(Int pair, Int count, Int first, Int columns, float* to, Int pitch, Packed& packed) const {
    for (Int group = 0; group < layer.out_groups; ++group) {
      const Int skipped = (group - pair % layer.out_groups + layer.out_groups) % layer.out_groups;
      const Int rows = (count - skipped + layer.out_groups - 1) / layer.out_groups;
      if (skipped >= count || rows <= 0) continue;
      mix_group(pair + skipped, rows, group, first, columns, to + skipped * layer.segments * pitch, pitch, packed);
    }
  }

  // Pairs of one output group: `rows` samples.
  void mix_group(Int pair, Int rows, Int group, Int first, Int columns, float* to, Int pitch, Packed& packed) const {
    const Int sample = pair / layer.out_groups, row_pitch = layer.out_groups * layer.segments * pitch;
    std::vector<Int> active;
    for (Int k = 0; k < layer.n; ++k)
      for (Int row = 0; row < rows; ++row)
        if (hidden[(sample + row) * layer.n + k] != 0) {
          active.push_back(k);
          break;
        }
    const Int depth = static_cast<Int>(active.size());
    std::vector<float> weights(rows * depth);
    std::vector<const float*> lines(depth);
    for (Int segment = 0; segment < layer.segments; ++segment) {
      for (Int row = 0; row < rows; ++row)
        for (Int k = 0; k < depth; ++k)
          weights[row * depth + k] = hidden[(sample + row) * layer.n + active[k]] *
                                     scale[(pair + row * layer.out_groups) * layer.segments + segment];
      const float* own = basis + (group * layer.segments + segment) * layer.n * layer.cell() + first;
      if (depth == layer.n) {
        mix(weights.data(), rows, depth, own, layer.cell(), columns, to + segment * pitch, row_pitch, packed);
      } else {
        for (Int k = 0; k < depth; ++k) lines[k] = own + active[k] * layer.cell();
        mix_streamed(weights.data(), rows, lines, columns, to + segment * pitch, row_pitch);
      }
    }
  }

  BasisMixer from_sample(Int sample) const {
    return {layer, hidden + sample * layer.n, scale + sample * layer.out_groups * layer.segments, basis};
  }
};

// attention [batch, out_groups, segments, n], cells [n, cell_out, cell_in].
inline Layer layer_of_cells(const Tensor& attention, const Tensor& cells) {
  return {attention.size(0), attention.size(1), attention.size(2), attention.size(3), cells.size(1), cells.size(2)};
}

// hidden [batch, n], basis [out_groups, segments, n, cell_out, cell_in].
inline Layer layer_of_basis(const Tensor& hidden, const Tensor& basis) {
  return {hidden.size(0), basis.size(0), basis.size(1), basis.size(2), basis.size(3), basis.size(4)};
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
