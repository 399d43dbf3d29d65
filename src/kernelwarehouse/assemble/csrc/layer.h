// The facts of one call that all loops share, and mixing, which forward and backward have in common.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <atomic>
#include <vector>

#include "memory.h"
#include "streaming.h"
#include "tiles.h"

namespace kernelwarehouse {

using at::Tensor;

struct Layer {
  Int batch, out_groups, segments, n;  // segments = taps * in_groups; n cells, or units of the hidden vector
  Int cell_out, cell_in;

  Int cell() const { return cell_out * cell_in; }
  Int out_channels() const { return out_groups * cell_out; }
  Int pairs() const { return batch * out_groups; }  // (sample, output group): each has `segments` mixtures of its own
};

// How pairs are split between tasks, beside blocks: each run of pairs mixes from all of the cells, so there are as few
// as give the threads about even shares. Threads have theirs from the beginning, and all wait for the largest.
struct Runs {
  Int runs = 1, run;
  Int share;  // the largest one, in pairs of one block

  Runs(Int pairs, Int blocks) : run(std::max<Int>(1, pairs)), share(run) {
    const Int threads = at::get_num_threads(), most = std::min(pairs, 4 * threads);
    share = share_of(threads, blocks);
    for (Int wanted = 2; wanted <= most && !about_even(share, threads, pairs * blocks); ++wanted) {
      Runs other = *this;
      other.run = (pairs + wanted - 1) / wanted;
      other.runs = (pairs + other.run - 1) / other.run;
      other.share = other.share_of(threads, blocks);
      if (other.share < share) *this = other;
    }
  }

  static bool about_even(Int share, Int threads, Int whole) { return 8 * threads * share <= 9 * whole; }

 private:
  Int share_of(Int threads, Int blocks) const { return (blocks * runs + threads - 1) / threads * run; }
};

// The width of blocks of so many channels, a multiple of `step`: as wanted at most, and about even. Where threads have
// more even shares of narrower blocks, it is down to half of that, or as little as it takes to have work for all.
inline Int block_width(Int channels, Int wanted, Int step, Int pairs) {
  const Int threads = at::get_num_threads(), fewest = (channels + wanted - 1) / wanted;
  const Int most = threads == 1 ? fewest : std::max(2 * fewest, fewest + threads / std::max<Int>(1, pairs));
  const auto width_of = [&](Int blocks) { return round_up((channels + blocks - 1) / blocks, step); };
  const auto runs_of = [&](Int width) { return Runs(pairs, (channels + width - 1) / width); };
  Int best = width_of(fewest);
  Runs runs = runs_of(best);
  for (Int blocks = fewest + 1; blocks <= most; ++blocks) {
    if (runs.runs == 1 && Runs::about_even(runs.share * best, threads, pairs * channels)) break;
    const Int width = width_of(blocks);
    const Runs other = runs_of(width);
    const Int more = other.share * width - runs.share * best;
    if (more < 0 || (more == 0 && other.runs < runs.runs)) best = width, runs = other;
  }
  return best;
}

// The order in which a call goes through blocks of the cells. Layers of a stage read the same cells, one after the
// other; where a cache does not hold all of them, the first are gone when the next layer begins with them. So every
// call goes the other way than the one before, and begins with what was read last.
class ThereAndBack {
 public:
  explicit ThereAndBack(Int blocks) : blocks_(blocks), back_(calls().fetch_add(1) % 2 == 1) {}

  Int operator()(Int step) const { return back_ ? blocks_ - 1 - step : step; }

 private:
  static std::atomic<unsigned>& calls() {
    static std::atomic<unsigned> count{0};
    return count;
  }

  const Int blocks_;
  const bool back_;
};

inline const void* address(const void* numbers) { return numbers; }
inline const void* address(Split numbers) { return numbers.high; }

// What was packed last: several runs of samples use the same piece of the cells, one after the other. For one source
// only: depth and pitch are taken to stay the same.
struct Packed {
  Numbers numbers, scratch;
  const void* from = nullptr;
  Int columns = 0;
};

// Up to how many rows nothing is packed.
constexpr Int kFewRows = 32;

// Columns that are packed at a time: a piece that stays in cache.
inline Int packed_columns(Int depth) { return std::max<Int>(kWide, third_level() / 4 / depth / kWide * kWide); }

// to[row][column] = sum over k of weights[row][k] * from[k][column], for any number of rows; from[k], from[k + 1] are
// `pitch` apart.
template <class Source>
inline void mix(const float* weights, Int rows, Int depth, Source from, Int pitch, Int columns, float* to, Int to_pitch,
                Packed& packed) {
  // Packing costs a copy, which more rows pay for. Cells that stay in cache are packed in small pieces, which the rows
  // then find nearest; cells that come from memory in pieces long enough to be read at its full speed.
  constexpr Int some = 64, short_piece = 256;
  const bool near = depth * pitch <= 4 * third_level();
  if (rows <= kFewRows) {
    std::vector<Source> lines(depth);
    for (Int k = 0; k < depth; ++k) lines[k] = from + k * pitch;
    return mix_streamed(weights, rows, lines, columns, to, to_pitch);
  }
  const Int piece = near && rows <= some ? std::min(short_piece, packed_columns(depth)) : packed_columns(depth);
  packed.numbers.resize(depth * piece);
  for (Int column = 0; column < columns; column += piece) {
    const Int count = std::min(piece, columns - column);
    if (packed.from != address(from + column) || packed.columns != count) {
      pack_panels(from + column, pitch, depth, count, packed.numbers.data());
      packed.from = address(from + column);
      packed.columns = count;
    }
    multiply_packed(weights, depth, rows, depth, packed.numbers.data(), count, to + column, to_pitch);
  }
}

// Cells that come from memory are read in whole rows, by as many samples as can be: short pieces of them would cost
// more than kernels that are farther away.
inline bool far(const Layer& layer) { return layer.n * layer.cell() > 4 * third_level(); }

// A block of a cell: output channels [first, first + width) and input channels [in, in + ins).
struct Block {
  Int first, width, in, ins;
};

// The same for a block of a cell, turned around: to[row][c][o] = sum over k of weights[row][k] * from(k)[o][c].
template <class From>
inline void mix_turned(const Layer& layer, const float* weights, Int rows, Int depth, const From& from,
                       const Block& block, float* to, Int to_pitch, bool pack, Packed& packed) {
  const Int start = block.first * layer.cell_in + block.in, size = block.width * block.ins;
  if (!pack) {
    const Int pitch = kLanes * layer.cell_in + kWide;  // `ins` is all of them
    packed.scratch.resize(rows * pitch);
    std::vector<decltype(from(0))> lines(depth);
    for (Int o = 0; o < block.width; o += kLanes) {
      const Int channels = std::min(kLanes, block.width - o);
      for (Int k = 0; k < depth; ++k) lines[k] = from(k) + start + o * layer.cell_in;
      mix_streamed(weights, rows, lines, channels * layer.cell_in, packed.scratch.data(), pitch);
      for (Int row = 0; row < rows; ++row)
        transpose(packed.scratch.data() + row * pitch, layer.cell_in, channels, layer.cell_in, to + row * to_pitch + o,
                  block.width);
    }
    return;
  }
  const Int pitch = depth * block.width;  // packed: [input channel][depth][width]
  if (packed.from != address(from(0) + start) || packed.columns != size) {
    packed.numbers.resize(depth * size);
    for (Int k = 0; k < depth; ++k)
      transpose(from(k) + start, layer.cell_in, block.width, block.ins, packed.numbers.data() + k * block.width, pitch);
    packed.from = address(from(0) + start);
    packed.columns = size;
  }
  // As many input channels in a row as stay nearest while all rows use them.
  const Int together = std::max<Int>(1, first_level() / 2 / std::max<Int>(1, pitch));
  for (Int c = 0; c < block.ins; c += together)
    for_panels(block.width, [&](Int o, Int width) {
      const AlongRows product{.depth = depth,
                              .b = packed.numbers.data() + c * pitch + o,
                              .pitch = block.width,
                              .repeats = std::min(together, block.ins - c),
                              .to_step = block.width};
      multiply_panel(product, weights, depth, rows, width, to + c * block.width + o, to_pitch);
    });
}

// Numbers as pieces of so many bytes, added to others, as long as all of them fit half of the second-level cache.
template <class Number>
inline void cut(const Number* from, Int count, Int piece, std::vector<const char*>& pieces) {
  const Int most = second_level() / 2 * static_cast<Int>(sizeof(float)) / piece;
  const char *start = reinterpret_cast<const char*>(from), *end = reinterpret_cast<const char*>(from + count);
  for (; start < end && static_cast<Int>(pieces.size()) < most; start += piece) pieces.push_back(start);
}
inline void cut(Split from, Int count, Int piece, std::vector<const char*>& pieces) {
  cut(from.high, count, piece, pieces);
  cut(from.low, count, piece, pieces);
}

// The two ways to mix the kernels of `count` pairs from `pair` on: either for the columns [first, first + columns) of a
// cell, to[pair][segment][column], or for a block of it, turned around, to[pair][segment][c][o]. Segments are `pitch`
// apart.

// From cells: attention [pairs][segments][n] x cells [n][cell].
struct CellMixer {
  const Layer& layer;
  const float* attention;
  const float* cells;

  void operator()(Int pair, Int count, Int first, Int columns, float* to, Int pitch, Packed& packed) const {
    mix(attention + pair * layer.segments * layer.n, count * layer.segments, layer.n, cells + first, layer.cell(),
        columns, to, pitch, packed);
  }

  void operator()(Int pair, Int count, const Block& block, float* to, Int pitch, Packed& packed) const {
    mix_turned(
        layer, attention + pair * layer.segments * layer.n, count * layer.segments, layer.n,
        [&](Int k) { return cells + k * layer.cell(); }, block, to, pitch, packs(), packed);
  }

  // The pieces of which these output channels will be mixed, as far as a cache can hold them until then.
  void fetch(Int first, Int width, Int piece, std::vector<const char*>& pieces) const {
    for (Int k = 0; k < layer.n; ++k)
      cut(cells + k * layer.cell() + first * layer.cell_in, width * layer.cell_in, piece, pieces);
  }

  bool packs() const { return layer.pairs() * layer.segments > kFewRows; }
  // For kernels at a time: near, beside packed cells; where nothing is packed, every run of pairs reads the cells
  // again.
  Int room() const { return second_level() / (packs() ? 8 : 2); }

  CellMixer from_sample(Int sample) const {
    return {layer, attention + sample * layer.out_groups * layer.segments * layer.n, cells};
  }
};

// attention [batch, out_groups, segments, n], cells [n, cell_out, cell_in].
inline Layer layer_of_cells(const Tensor& attention, const Tensor& cells) {
  return {attention.size(0), attention.size(1), attention.size(2), attention.size(3), cells.size(1), cells.size(2)};
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
inline void sample_to_rows(const float* x, bool channels_last, Int channels, const Int* targets, Int places,
                           float* rows, Int pitch, Numbers& turned) {
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
