// Mixing from bases that are kept, of which every mixture has its own.
//
// They come in one of two orders: [out_groups][segments][n][cell]; or in panels, [out_groups][segments][panel of kWide
// output channels][cell_in][n][kWide], which a product with the weights of many samples reads from front to end, and
// whose mixtures need not be turned around. Units of the hidden vector that are 0 in all samples, as a ReLU leaves many
// of a single one, are passed over; but in panels each is a line or two between others, which memory brings along.
#pragma once

#include "layer.h"

namespace kernelwarehouse {

// Whether a basis is in panels; sizes of 1 for kernel positions may follow the others of one that is not.
inline bool in_panels(const Tensor& basis) { return basis.dim() == 6 && basis.size(5) == kWide; }

// hidden [batch, n], and a basis in either order.
inline Layer layer_of_basis(const Tensor& hidden, const Tensor& basis) {
  const Int batch = hidden.size(0), groups = basis.size(0), segments = basis.size(1);
  if (in_panels(basis)) return {batch, groups, segments, basis.size(4), basis.size(2) * kWide, basis.size(3)};
  return {batch, groups, segments, basis.size(2), basis.size(3), basis.size(4)};
}

// As AcrossRows, for numbers of any type; what is so many of them `ahead` of each row of B, if any are, is fetched.
// Sums are not added to what is there.
template <class Number>
struct AcrossUnits {
  Int depth;
  const Number* b;
  const Int* places;
  Int ahead;

  template <int R, int V, int L>
  __attribute__((noinline)) void multiply(const float* a, const Targets& to, bool) const {
    Tile<R, V, L> tile;
    const auto step = [&](Int k) {
      const Number* row = b + places[k];
      tile.multiply([&](int r) { return a[r]; }, row);
      a += R;
      return row + ahead;
    };
    if (ahead)
      for (Int k = 0; k < depth; ++k) fetch(step(k), V * L);
    else
      for (Int k = 0; k < depth; ++k) step(k);
    tile.write(to, false);
  }
};

// scale [pairs][segments] * (hidden [batch][n] x basis). Bases may be kept in 16 or 24 bits, as multiples of steps
// [out_groups][segments][n], which weights take care of.
template <class Source>
struct BasisMixer {
  static constexpr bool kSplit = std::is_same_v<Source, Split>;

  const Layer& layer;
  const float* hidden;
  const float* scale;
  Source basis;
  const float* steps;  // or none
  bool panels;         // never split ones

  // Of bases that are not in panels.
  void operator()(Int pair, Int count, Int first, Int columns, float* to, Int pitch, Packed& packed) const {
    for_groups(
        pair, count, to, pitch,
        [&](const float* weights, Int rows, const std::vector<Int>& active, Source own, float* target, Int row_pitch) {
          const Int depth = static_cast<Int>(active.size());
          if (depth == layer.n) {
            mix(weights, rows, depth, own + first, layer.cell(), columns, target, row_pitch, packed);
          } else {
            std::vector<Source> lines(depth);
            for (Int k = 0; k < depth; ++k) lines[k] = own + active[k] * layer.cell() + first;
            mix_streamed(weights, rows, lines, columns, target, row_pitch);
          }
        });
  }

  void operator()(Int pair, Int count, const Block& block, float* to, Int pitch, Packed& packed) const {
    for_groups(
        pair, count, to, pitch,
        [&](const float* weights, Int rows, const std::vector<Int>& active, Source own, float* target, Int row_pitch) {
          if constexpr (!kSplit)
            if (panels) return mix_panels(weights, rows, active, own, block, target, row_pitch, packed);
          const Int depth = static_cast<Int>(active.size());
          const auto from = [&](Int k) { return own + (depth == 0 ? 0 : active[k]) * layer.cell(); };
          packed.from = nullptr;  // the same bases, but other units of them
          mix_turned(layer, weights, rows, depth, from, block, target, row_pitch, packs(), packed);
        });
  }

  void fetch(Int first, Int width, Int piece, std::vector<const char*>& pieces) const {
    if (panels) return;  // are read from front to end
    for (Int mixture = 0; mixture < layer.out_groups * layer.segments; ++mixture)
      for (Int k = 0; k < layer.n; ++k)
        if (hidden[k] != 0)
          cut(basis + (mixture * layer.n + k) * layer.cell() + first * layer.cell_in, width * layer.cell_in, piece,
              pieces);
  }

  bool packs() const { return !panels && layer.batch > kFewRows; }
  Int room() const { return 2 * kBlock; }  // of as many samples as can be, as every run of them reads all bases

  BasisMixer from_sample(Int sample) const {
    return {layer, hidden + sample * layer.n, scale + sample * layer.out_groups * layer.segments, basis, steps, panels};
  }

 private:
  // Blocks begin with a panel, and end with one.
  template <class Number>
  void mix_panels(const float* weights, Int rows, const std::vector<Int>& active, const Number* own, const Block& block,
                  float* to, Int to_pitch, Packed& packed) const {
    const Int depth = static_cast<Int>(active.size()), line = layer.n * kWide;
    std::vector<Int> places;
    for (const Int unit : active) places.push_back(unit * kWide);
    packed.scratch.resize(rows * depth);
    for_row_tiles(rows, [&](Int first, Int tall) {
      transpose(weights + first * depth, depth, tall, depth, packed.scratch.data() + first * depth, tall);
    });
    for (Int o = 0; o < block.width; o += kWide)
      for (Int c = 0; c < block.ins; ++c) {
        const Number* from = own + ((block.first + o) / kWide * layer.cell_in + block.in + c) * line;
        for_row_tiles(rows, [&](Int first, Int tall) {
          const AcrossUnits<Number> product{depth, from, places.data(), first == 0 ? line : 0};
          const auto targets = starts(tall, [&](Int r) { return to + (first + r) * to_pitch + c * block.width + o; });
          multiply_tile(product, tall, kWide, packed.scratch.data() + first * depth, targets, false);
        });
      }
  }

  // Calls mix(weights, rows, units that are not 0, basis, to, pitch) for every output group and segment of these pairs:
  // a row for every sample.
  template <class Mix>
  void for_groups(Int pair, Int count, float* to, Int pitch, const Mix& mix) const {
    for (Int group = 0; group < layer.out_groups; ++group) {
      const Int skipped = (group - pair % layer.out_groups + layer.out_groups) % layer.out_groups;
      const Int rows = (count - skipped + layer.out_groups - 1) / layer.out_groups;
      if (skipped >= count || rows <= 0) continue;
      const Int first = pair + skipped, sample = first / layer.out_groups;
      std::vector<Int> active;
      for (Int k = 0; k < layer.n; ++k)
        for (Int row = 0; row < rows; ++row)
          if (hidden[(sample + row) * layer.n + k] != 0) {
            active.push_back(k);
            break;
          }
      const Int depth = static_cast<Int>(active.size());
      std::vector<float> weights(rows * depth);
      for (Int segment = 0; segment < layer.segments; ++segment) {
        const Int mixture = group * layer.segments + segment;
        for (Int row = 0; row < rows; ++row)
          for (Int k = 0; k < depth; ++k)
            weights[row * depth + k] = hidden[(sample + row) * layer.n + active[k]] *
                                       scale[(first + row * layer.out_groups) * layer.segments + segment] *
                                       (steps ? steps[mixture * layer.n + active[k]] : 1.0f);
        mix(weights.data(), rows, active, basis + mixture * layer.n * layer.cell(),
            to + (skipped * layer.segments + segment) * pitch, layer.out_groups * layer.segments * pitch);
      }
    }
  }
};

}  // namespace kernelwarehouse
