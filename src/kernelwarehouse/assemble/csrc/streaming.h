// Mixing of few rows: nothing is packed, and every number is read once, from wherever it lies.
//
// There are several ways to read so much and compute so little, and which is the fastest is a matter of the processor.
// One reads along few lines at a time, and leaves it to the machine to foresee what comes next; or it fetches that
// ahead, across the ends of lines as well. The other reads across many lines, so that sums stay in registers, and
// always fetches ahead. All add up in the same order: results are the same to the last bit, so the choice can be made
// by every process anew. Split numbers are always read along few lines: for every tile that goes across, they would
// have to be put together again.
#pragma once

#include <chrono>

#include "memory.h"
#include "tiles.h"

namespace kernelwarehouse {

// Rows of B each from lines[k] + column on: what the tile after some others will need is fetched ahead. A source of
// numbers is a pointer to them, or what can be used like one.
template <class Source>
struct AcrossLines {
  Int depth;
  const Source* lines;
  Int column;
  static constexpr Int kAhead = 8;  // tiles

  template <int R, int V, int L>
  __attribute__((noinline)) void multiply(const float* a, const Targets& to, bool add) const {
    Tile<R, V, L> tile = add ? Tile<R, V, L>(to) : Tile<R, V, L>();
    for (Int k = 0; k < depth; ++k, a += R) {
      const Source row = lines[k] + column;
      fetch(row + kAhead * V * L, V * L);
      tile.multiply([&](int r) { return a[r]; }, row);
    }
    tile.write(to, false);
  }
};

// to[row][column] = sum over k of weights[row][k] * lines[k][column], where there is at least one line.
template <class Source>
inline void mix_across_lines(const float* weights, Int rows, const std::vector<Source>& lines, Int columns, float* to,
                             Int to_pitch) {
  // Lines at a time: no more than a processor knows pages by heart, and columns of which all tiles find them near.
  constexpr Int together = 48;
  const Int depth = static_cast<Int>(lines.size()), blocks = (depth + together - 1) / together;
  const Int stream = std::max(second_level() / 4 / together / kWide, Int{8}) * kWide;
  Numbers packed(rows * depth);  // the weights of a tile, line by line
  for_row_tiles(rows, [&](Int first, Int tall) {
    transpose(weights + first * depth, depth, tall, depth, packed.data() + first * depth, tall);
  });
  for (Int column = 0; column < columns; column += stream)
    for (Int block = 0; block < blocks; ++block) {
      const Int k = depth * block / blocks, end = depth * (block + 1) / blocks;
      for_row_tiles(rows, [&](Int first, Int tall) {
        for_panels(std::min(stream, columns - column), [&](Int panel, Int width) {
          const auto targets = starts(tall, [&](Int r) { return to + (first + r) * to_pitch + column + panel; });
          const AcrossLines<Source> product{end - k, lines.data() + k, column + panel};
          multiply_tile(product, tall, width, packed.data() + first * depth + k * tall, targets, block > 0);
        });
      });
    }
}

// A panel of K lines, for all rows: a sum is loaded and stored once for K products.
template <int K, int V, int L, class Source>
inline void mix_panel(const float* weights, Int weights_pitch, Int rows, const Source* lines, float* to, Int to_pitch,
                      bool add) {
  Vector<L> numbers[K][V];
  KERNELWAREHOUSE_UNROLL for (int k = 0; k < K; ++k) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) numbers[k][v] =
      load<L>(lines[k] + v * L);
  for (; rows > 0; --rows, weights += weights_pitch, to += to_pitch)
    KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) {
      Vector<L> sum = add ? load<L>(to + v * L) : Vector<L>{};
      KERNELWAREHOUSE_UNROLL for (int k = 0; k < K; ++k) sum += weights[k] * numbers[k][v];
      store(to + v * L, sum);
    }
}

// The same as mix_across_lines; what comes next is fetched ahead, or not.
template <bool fetching, class Source>
inline void mix_along_lines(const float* weights, Int rows, const std::vector<Source>& lines, Int columns, float* to,
                            Int to_pitch) {
  constexpr Int together = 6, far = 512;  // numbers ahead: enough to wait for memory, few enough to be kept so long
  const Int depth = static_cast<Int>(lines.size());
  // Sums stay near, reading runs on, and no piece is much shorter than the others.
  const Int most = std::max(2 * first_level() / rows / kWide, Int{8}) * kWide, pieces = (columns + most - 1) / most;
  const Int piece = round_up((columns + pieces - 1) / pieces, kWide);
  for (Int column = 0; column < columns; column += piece) {
    const Int size = std::min(piece, columns - column), ahead = std::min(far, size);
    for (Int k = 0; k < depth; k += together)
      with_constant<together>(std::min(together, depth - k), [&](auto count) {
        // After the end of these lines' pieces come the next lines, or the next pieces of the first ones.
        const bool last = k + together >= depth;
        const Int others = std::min(together, last ? depth : depth - k - together);
        Source next[together];
        for (int i = 0; i < others; ++i) next[i] = last ? lines[i] + column + size : lines[k + together + i] + column;
        for_panels(size, [&](Int panel, Int width) {
          Source from[count];
          for (int i = 0; i < count; ++i) from[i] = lines[k + i] + column + panel;
          if constexpr (fetching) {
            const Int beyond = panel + ahead - size;
            if (beyond < 0)
              for (int i = 0; i < count; ++i) fetch(from[i] + ahead, width);
            else
              for (int i = 0; i < others; ++i) fetch(next[i] + beyond, width);
          }
          const auto mix = [&](auto vectors, auto lanes) {
            mix_panel<count, vectors, lanes>(weights + k, depth, rows, from, to + column + panel, to_pitch, k > 0);
          };
          if (width == kWide)
            mix(std::integral_constant<int, 2>(), std::integral_constant<int, kLanes>());
          else if (width == kLanes)
            mix(std::integral_constant<int, 1>(), std::integral_constant<int, kLanes>());
          else
            mix(std::integral_constant<int, 1>(), std::integral_constant<int, kGrain>());
        });
      });
  }
}

// What is read and computed is in balance for some rows, and reading is all that counts for fewer.
constexpr Int kVeryFew = 8;

enum class Way : Int { along, along_fetching, across };
constexpr Int kWays = 3;

template <class Source>
inline void mix_in_a_way(Way way, const float* weights, Int rows, const std::vector<Source>& lines, Int columns,
                         float* to, Int to_pitch) {
  if constexpr (!std::is_same_v<Source, Split>)
    if (way == Way::across) return mix_across_lines(weights, rows, lines, columns, to, to_pitch);
  if (way == Way::along)
    mix_along_lines<false>(weights, rows, lines, columns, to, to_pitch);
  else
    mix_along_lines<true>(weights, rows, lines, columns, to, to_pitch);
}

// How very few rows, and few, are mixed.
struct Ways {
  Way very_few, few;
};

// The fastest ways on this processor. All are tried on 32 MB, as they differ most where numbers come from memory:
// beside less than a cache holds, noise has decided. Lines are a power of two apart, as those of most cells are, which
// compete for the same places of a cache.
inline Ways find_ways() {
  constexpr Int depth = 64, columns = 1 << 17, most_rows = kVeryFew + 1, pitch = columns + kWide;
  const Numbers numbers(depth * columns, 1.0f), weights(most_rows * depth, 1.0f);
  Numbers sums(most_rows * pitch, 0.0f);
  std::vector<const float*> lines(depth);
  for (Int k = 0; k < depth; ++k) lines[k] = numbers.data() + k * columns;
  const auto fastest = [&](Int rows) {
    std::array<double, kWays> best;
    best.fill(1e9);
    for (int round = 0; round < 5; ++round)
      for (std::size_t way = 0; way < best.size(); ++way) {
        const auto start = std::chrono::steady_clock::now();
        mix_in_a_way(Way(way), weights.data(), rows, lines, columns, sums.data(), pitch);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        best[way] = std::min(best[way], taken.count());
      }
    return Way(std::min_element(best.begin(), best.end()) - best.begin());
  };
  return {fastest(kVeryFew / 2), fastest(most_rows)};
}

// The ways that are taken: found out once, in about a tenth of a second; tests set them.
inline Ways& ways() {
  static Ways chosen = find_ways();
  return chosen;
}

// to[row][column] = sum over k of weights[row][k] * lines[k][column].
template <class Source>
inline void mix_streamed(const float* weights, Int rows, const std::vector<Source>& lines, Int columns, float* to,
                         Int to_pitch) {
  if (lines.empty()) {
    for (Int row = 0; row < rows; ++row) std::fill_n(to + row * to_pitch, columns, 0.0f);
    return;
  }
  mix_in_a_way(rows <= kVeryFew ? ways().very_few : ways().few, weights, rows, lines, columns, to, to_pitch);
}

}  // namespace kernelwarehouse
