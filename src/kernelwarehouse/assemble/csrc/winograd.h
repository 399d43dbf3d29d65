// Winograd's way to convolve with kernels of 3x3 at stride 1: an output tile of 2x2 takes 16 products for every pair of
// channels instead of 36.
//
// What a tile sees, 4x4 numbers of every channel, becomes 16 others by sums and differences, and so does a kernel; at
// each of these 16 points, channels are summed up by an ordinary matrix product; 16 sums become the tile's four
// outputs. Kernels are mixed as ever, before they are transformed: that takes 35 operations for 9 mixtures, which take
// n each. Everything is a sum of products, so gradients go back through the transposes of the same steps. A number that
// is not finite spreads over its tile.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

constexpr Int kPoints = 16;

// One axis of a transform: kFrom numbers become kTo.
struct KernelToPoints {
  static constexpr int kFrom = 3, kTo = 4;
  template <class V>
  static void along(const V (&from)[3], V (&to)[4]) {
    const V even = (from[0] + from[2]) * 0.5f, odd = from[1] * 0.5f;
    to[0] = from[0], to[1] = even + odd, to[2] = even - odd, to[3] = from[2];
  }
};
struct PointsToKernelGradient {
  static constexpr int kFrom = 4, kTo = 3;
  template <class V>
  static void along(const V (&from)[4], V (&to)[3]) {
    const V even = (from[1] + from[2]) * 0.5f, odd = (from[1] - from[2]) * 0.5f;
    to[0] = from[0] + even, to[1] = odd, to[2] = from[3] + even;
  }
};
struct InputToPoints {
  static constexpr int kFrom = 4, kTo = 4;
  template <class V>
  static void along(const V (&from)[4], V (&to)[4]) {
    to[0] = from[0] - from[2], to[1] = from[1] + from[2], to[2] = from[2] - from[1], to[3] = from[1] - from[3];
  }
};
struct PointsToInputGradient {
  static constexpr int kFrom = 4, kTo = 4;
  template <class V>
  static void along(const V (&from)[4], V (&to)[4]) {
    to[0] = from[0], to[1] = from[1] - from[2] + from[3], to[2] = from[1] + from[2] - from[0], to[3] = -from[3];
  }
};
struct PointsToOutput {
  static constexpr int kFrom = 4, kTo = 2;
  template <class V>
  static void along(const V (&from)[4], V (&to)[2]) {
    to[0] = from[0] + from[1] + from[2], to[1] = from[1] - from[2] - from[3];
  }
};
struct OutputGradientToPoints {
  static constexpr int kFrom = 2, kTo = 4;
  template <class V>
  static void along(const V (&from)[2], V (&to)[4]) {
    to[0] = from[0], to[1] = from[0] + from[1], to[2] = from[0] - from[1], to[3] = -from[1];
  }
};

// Where the numbers of a square lie: rows of it and columns of it so far apart.
template <class Number>
struct Square {
  Number* at;
  Int row, column;

  Number* place(int i, int j) const { return at + i * row + j * column; }
};

template <class Axis, int L>
inline void transform_vector(const Square<const float>& from, const Square<float>& to, Int c, bool add) {
  constexpr int kFrom = Axis::kFrom, kTo = Axis::kTo;
  using Register = typename VectorOf<L>::Register;
  Register half[kTo][kFrom];
  KERNELWAREHOUSE_UNROLL for (int j = 0; j < kFrom; ++j) {
    Register column[kFrom], found[kTo];
    KERNELWAREHOUSE_UNROLL for (int i = 0; i < kFrom; ++i) column[i] = load<L>(from.place(i, j) + c);
    Axis::along(column, found);
    KERNELWAREHOUSE_UNROLL for (int i = 0; i < kTo; ++i) half[i][j] = found[i];
  }
  KERNELWAREHOUSE_UNROLL for (int i = 0; i < kTo; ++i) {
    Register row[kTo];
    Axis::along(half[i], row);
    KERNELWAREHOUSE_UNROLL for (int j = 0; j < kTo; ++j) {
      float* target = to.place(i, j) + c;
      store(target, add ? load<L>(target) + row[j] : row[j]);
    }
  }
}

// Both axes of squares, for `count` neighbours (a multiple of kGrain) at every place of them.
template <class Axis>
__attribute__((noinline)) void transform(const Square<const float>& from, const Square<float>& to, Int count,
                                         bool add = false) {
  Int c = 0;
  for (; c + kLanes <= count; c += kLanes) transform_vector<Axis, kLanes>(from, to, c, add);
  for (; c < count; c += kGrain) transform_vector<Axis, kGrain>(from, to, c, add);
}

// From the numbers of one point to those of the next: no power of two, which would map all points to few cache sets.
inline Int point_pitch(Int numbers) { return round_up(numbers, kWide) + kWide; }

// Points [16] of something, `pitch` apart.
template <class Number>
inline Square<Number> points(Number* first, Int pitch) {
  return {first, 4 * pitch, pitch};
}

// How an output is cut into tiles, and what they look at: rows of channels, in grids that go on up to whole tiles.
struct Tiling {
  Int input_height, input_width, top, left;  // with its padding
  Int height, width;                         // of the output
  Int down, across;                          // tiles

  Tiling(Int image_height, Int image_width, Int padding_y, Int padding_x)
      : input_height(image_height),
        input_width(image_width),
        top(padding_y),
        left(padding_x),
        height(image_height + 2 * padding_y - 2),
        width(image_width + 2 * padding_x - 2),
        down((height + 1) / 2),
        across((width + 1) / 2) {}

  Int input_pitch() const { return 2 * across + 2; }
  Int input_places() const { return (2 * down + 2) * input_pitch(); }
  Int output_pitch() const { return 2 * across; }
  Int output_places() const { return 2 * down * output_pitch(); }

  // The rows that places of an image have in these grids.
  std::vector<Int> input_rows() const { return rows(input_height, input_width, top, left, input_pitch()); }
  std::vector<Int> output_rows() const { return rows(height, width, 0, 0, output_pitch()); }

  // Rows of tiles that are gone through at a time, about as even as can be: enough tiles for a product, few enough that
  // `numbers` for each of them stay near.
  Int rows_together(Int numbers) const {
    const Int most = std::max<Int>(1, second_level() / 4 / numbers / across), strips = (down + most - 1) / most;
    return (down + strips - 1) / strips;
  }

  // body(tile among these, its row, its column) for all tiles of some rows of them.
  template <class Body>
  void for_tiles(Int row, Int rows, const Body& body) const {
    for (Int tile = 0; tile < rows * across; ++tile) body(tile, row + tile / across, tile % across);
  }

  // What a tile sees, and what it gives, in grids whose rows are `pitch` apart.
  template <class Number>
  Square<Number> input_of(Number* rows, Int pitch, Int row, Int column) const {
    return {rows + (2 * row * input_pitch() + 2 * column) * pitch, input_pitch() * pitch, pitch};
  }
  template <class Number>
  Square<Number> output_of(Number* rows, Int pitch, Int row, Int column) const {
    return {rows + (2 * row * output_pitch() + 2 * column) * pitch, output_pitch() * pitch, pitch};
  }

 private:
  static std::vector<Int> rows(Int height, Int width, Int top, Int left, Int grid_pitch) {
    std::vector<Int> found;
    found.reserve(height * width);
    for (Int y = 0; y < height; ++y)
      for (Int x = 0; x < width; ++x) found.push_back((y + top) * grid_pitch + x + left);
    return found;
  }
};

// Nine mixtures make a 3x3 kernel, and the images, [batch, in, height, width] or [batch, height, width, in], have to be
// as large as that.
inline Tiling check_square(const Layer& layer, const Tensor& x, at::IntArrayRef padding, bool channels_last) {
  TORCH_CHECK_VALUE(layer.segments % 9 == 0, "mixtures come in ", layer.segments, " segments, no multiple of 9");
  TORCH_CHECK_VALUE(x.dim() == 4, "x has sizes ", x.sizes(), "; four are wanted");
  const Int height = x.size(channels_last ? 1 : 2), width = x.size(channels_last ? 2 : 3);
  check_images(x, "x", layer.batch, layer.segments / 9 * layer.cell_in, height * width, channels_last);
  TORCH_CHECK_VALUE(
      padding.size() == 2 && std::min(padding[0], padding[1]) >= 0 && std::max(padding[0], padding[1]) < kMost,
      "padding is ", padding);
  const Tiling tiling(height, width, padding[0], padding[1]);
  TORCH_CHECK_VALUE(tiling.height > 0 && tiling.width > 0 && std::max(tiling.height, tiling.width) < kMost / 2 &&
                        tiling.input_places() < kMost,
                    "images of ", height, "x", width, " padded by ", padding, " do not fit a kernel of 3x3");
  return tiling;
}

}  // namespace kernelwarehouse
