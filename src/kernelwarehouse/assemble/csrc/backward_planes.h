// Backward of kernels of one position, over images as they are: positions lie along the vectors, and nothing is turned
// around. For large maps, whose rows would cost more to make than to multiply.
#pragma once

#include <utility>

#include "backward.h"

namespace kernelwarehouse {

// Products of rows along positions: a tile of them has as many sums as a vector has numbers.
constexpr int kDotRows = 4, kDotColumns = kLanes / kDotRows;

// Lanes with the bit `Half` set are those of b, the others of a, each plus its counterpart half a group away.
template <int Half, int... lane>
inline Lanes fold(Lanes a, Lanes b, std::integer_sequence<int, lane...>) {
  return shuffle<(lane & Half ? kLanes + lane : lane)...>(a, b) +
         shuffle<(lane & Half ? kLanes + (lane ^ Half) : lane ^ Half)...>(a, b);
}

// The totals of as many vectors as a vector has numbers.
template <int Half = kLanes / 2>
inline Lanes totals(VectorOf<kLanes>::Register (&sums)[kLanes]) {
  KERNELWAREHOUSE_UNROLL for (int i = 0; i < Half; ++i) sums[i] =
      fold<Half>(sums[i], sums[i + Half], std::make_integer_sequence<int, kLanes>());
  if constexpr (Half > 1)
    return totals<Half / 2>(sums);
  else
    return sums[0];
}

class PlanesImages {
 public:
  struct Scratch {
    Numbers sums, rest, beyond;
    std::vector<Int> lines;  // where rows of `rest` start
  };

  PlanesImages(Backward& call, Int positions) : call_(call), positions_(positions) {
    call.choose_blocks(1, call.layer.cell());  // of images, however large, a part at a time has to stay near
    x_.resize(call.samples);
    grad_.resize(call.samples);
    for (Int o = 0; o < call.width; ++o) lines_.push_back(o * positions);
  }

  void lay_out(Int sample, const float* x, const float* grad) {
    x_[sample] = x;
    grad_[sample] = grad;
  }

  void begin_input_gradient(Int, float* to) { grad_x_ = to; }

  void go_through(Int sample, Int channel, const Block& block, float* kernels, Scratch& scratch) {
    const Layer& layer = call_.layer;
    const float* grad = grad_[sample] + channel * positions_;
    scratch.sums.resize(layer.segments * call_.pitch());
    // Some positions at a time: what one product has read, the other finds in the second-level cache.
    const Int near = second_level() / 2 / (block.width + block.ins);
    const Int part = std::max(kWide, near / kWide * kWide);
    for (Int start = 0; start < positions_; start += part) {
      const Int count = std::min(part, positions_ - start);
      for (Int segment = 0; segment < layer.segments; ++segment) {
        const Int first = (segment * layer.cell_in + block.in) * positions_ + start, at = segment * call_.pitch();
        find_kernel_gradient(x_[sample] + first, grad + start, count, block, start > 0, scratch.sums.data() + at);
        if (call_.wants_input)
          find_input_gradient(kernels + at, grad + start, count, block, channel > 0,
                              grad_x_ + sample * layer.segments * layer.cell_in * positions_ + first, scratch);
      }
    }
    for (Int segment = 0; segment < layer.segments; ++segment)
      std::copy_n(scratch.sums.data() + segment * call_.pitch(), block.width * block.ins,
                  kernels + segment * call_.pitch());
  }

  void write_input_gradient(Int, float*) const {}  // it is there

 private:
  // The gradient of one segment of the kernels, [panel][block.width][columns]: sums over positions.
  void find_kernel_gradient(const float* x, const float* grad, Int count, const Block& block, bool add,
                            float* to) const {
    for (Int o = 0; o < block.width; o += kDotRows)
      for_panels(block.ins, [&](Int c, Int columns) {
        for (Int i = 0; i < columns; i += kDotColumns)
          multiply_along(grad + o * positions_, x + (c + i) * positions_, count, add,
                         to + c * block.width + o * columns + i, columns);
      });
  }

  // to[r][c] (+)= sum over positions of a[r] times b[c].
  void multiply_along(const float* a, const float* b, Int count, bool add, float* to, Int to_pitch) const {
    VectorOf<kLanes>::Register sums[kLanes] = {};
    const auto go_on = [&](const auto& read) {
      Lanes columns[kDotColumns];
      KERNELWAREHOUSE_UNROLL for (int c = 0; c < kDotColumns; ++c) columns[c] = read(b + c * positions_);
      KERNELWAREHOUSE_UNROLL for (int r = 0; r < kDotRows; ++r) {
        const Lanes row = read(a + r * positions_);
        KERNELWAREHOUSE_UNROLL for (int c = 0; c < kDotColumns; ++c) sums[r * kDotColumns + c] += row * columns[c];
      }
    };
    Int p = 0;
    for (; p + kLanes <= count; p += kLanes) go_on([&](const float* from) { return load(from + p); });
    if (p < count && count >= kLanes) {  // the last vector once more, without what has been added already
      VectorOf<kLanes>::Whole left;
      for (Int lane = 0; lane < kLanes; ++lane) left[lane] = lane >= kLanes - (count - p) ? -1 : 0;
      go_on([&](const float* from) { return left ? load(from + count - kLanes) : Lanes{}; });
    } else if (p < count) {
      go_on([&](const float* from) { return load_some(from + p, count - p); });
    }
    const Lanes found = totals(sums);
    for (int r = 0; r < kDotRows; ++r, to += to_pitch)
      for (int c = 0; c < kDotColumns; ++c) to[c] = found[r * kDotColumns + c] + (add ? to[c] : 0.0f);
  }

  // What flows through one segment of the kernels to its input channels: begun, or added to.
  void find_input_gradient(const float* kernels, const float* grad, Int count, const Block& block, bool add, float* to,
                           Scratch& scratch) const {
    for_panels(round_up(count, kGrain), [&](Int position, Int columns) {
      const Int valid = std::min(columns, count - position);
      const bool whole = valid == columns;
      if (!whole) {
        scratch.rest.resize(block.width * columns);
        scratch.beyond.resize(kTall * columns);
        scratch.lines.resize(block.width);
        for (Int o = 0; o < block.width; ++o) {
          float* line = scratch.rest.data() + (scratch.lines[o] = o * columns);
          std::fill_n(std::copy_n(grad + o * positions_ + position, valid, line), columns - valid, 0.0f);
        }
      }
      const float* from = whole ? grad + position : scratch.rest.data();
      const Int* lines = whole ? lines_.data() : scratch.lines.data();
      for_panels(block.ins, [&](Int c, Int wide) {
        const AcrossRows product{block.width, from, lines, wide};
        for_row_tiles(wide, [&](Int i, Int tall) {
          const float* a = kernels + c * block.width + i;
          const auto target = [&](Int r) { return to + (c + i + r) * positions_ + position; };
          if (whole) return multiply_tile(product, tall, columns, a, starts(tall, target), add);
          float* beyond = scratch.beyond.data();
          multiply_tile(product, tall, columns, a, starts(tall, [&](Int r) { return beyond + r * columns; }), false);
          for (Int r = 0; r < tall; ++r)
            for (Int p = 0; p < valid; ++p) target(r)[p] = beyond[r * columns + p] + (add ? target(r)[p] : 0.0f);
        });
      });
    });
  }

  const Backward& call_;
  const Int positions_;
  std::vector<const float*> x_, grad_;  // of every sample
  float* grad_x_ = nullptr;             // of the first one
  std::vector<Int> lines_;              // where the rows of a block's output channels start
};

// grad [batch, out, positions] and x [batch, in, positions], both contiguous; the rest as in forward_pointwise.
inline std::tuple<Tensor, Tensor, Tensor> backward_planes(const Tensor& grad, const Tensor& x, const Tensor& attention,
                                                          const Tensor& cells, bool wants_input,
                                                          const std::optional<Tensor>& total) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  const Int channels = layer.segments * layer.cell_in;
  const Int positions = x.numel() / std::max<Int>(1, layer.batch * channels);
  check_images(x, "x", layer.batch, channels, positions);
  check_images(grad, "grad", layer.batch, layer.out_channels(), positions);
  if (total) check(*total, "total", cells.sizes());
  Backward call{.layer = layer, .wants_input = wants_input, .cells = cells.const_data_ptr<float>()};
  PlanesImages images(call, positions);
  return backward(call, images, grad, x, attention, cells, total);
}

}  // namespace kernelwarehouse
