// Depth-wise 3x3 layers: an input channel for every output channel (or for a few of them).
//
// The kernels are small, so all of them are mixed at once; what costs is moving the activations. Each channel is
// copied, padded, into a buffer that stays in the first-level cache; a row of outputs is then a sum of shifted rows.
// For stride 2, every row of the buffer is sorted into phases, its even and its odd columns: neighbouring outputs read
// neighbours.
#pragma once

#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

constexpr int kTaps = 9;  // 3x3 kernels only: their weights and sums stay in registers

struct Plane {
  Int height, width, out_height, out_width;
  Int pad_y, pad_x, dilation_y, dilation_x, stride_y, stride_x;

  // What the kernels reach; the end of a padded input may lie beyond, where the stride leaves a rest.
  Int padded_height() const { return (out_height - 1) * stride_y + 2 * dilation_y + 1; }
  Int padded_width() const { return (out_width - 1) * stride_x + 2 * dilation_x + 1; }
  Int phase() const { return (padded_width() + stride_x - 1) / stride_x + kLanes; }  // loads run over the end of a row
  Int pitch() const { return stride_x * phase(); }
  Int place(Int column) const { return column % stride_x * phase() + column / stride_x; }

  // One channel into the padded buffer, whose padding is zero and stays so.
  void fill(const float* from, float* padded) const {
    const Int rows = std::min(height, padded_height() - pad_y), columns = std::min(width, padded_width() - pad_x);
    for (Int y = 0; y < rows; ++y, from += width) {
      float* row = padded + (y + pad_y) * pitch();
      if (stride_x == 1)
        std::copy_n(from, columns, row + pad_x);
      else
        sort_into_phases(from, columns, row + place(pad_x), row + place(pad_x + 1));
    }
  }

  // For stride 2, the largest there is.
  static void sort_into_phases(const float* from, Int columns, float* even, float* odd) {
    Int x = 0;
    for (; x + 16 <= columns; x += 16, even += 8, odd += 8) {
      const Vector<8> left = load<8>(from + x), right = load<8>(from + x + 8);
      store(even, shuffle<0, 2, 4, 6, 8, 10, 12, 14>(left, right));
      store(odd, shuffle<1, 3, 5, 7, 9, 11, 13, 15>(left, right));
    }
    for (; x < columns; ++x) *(x % 2 == 0 ? even++ : odd++) = from[x];
  }

  // One channel's outputs; weights[tap * weight_pitch] is its kernel.
  template <int T>
  void convolve(const float* padded, const Int* offsets, const float* weights, Int weight_pitch, float* out) const {
    float kernel[T];
    for (int tap = 0; tap < T; ++tap) kernel[tap] = weights[tap * weight_pitch];
    for (Int y = 0; y < out_height; ++y)
      for_vectors(out_width, [&](Int x, auto lanes) {
        const float* from = padded + y * stride_y * pitch() + x;
        Vector<lanes> sum = {};
        KERNELWAREHOUSE_UNROLL for (int tap = 0; tap < T; ++tap) sum += kernel[tap] * load<lanes>(from + offsets[tap]);
        // What runs over the end of a row is overwritten by the next one.
        const Int at = y * out_width + x;
        store_some(out + at, sum, out_height * out_width - at);
      });
  }

  // For every tap, the sum over positions of output gradient times input: the gradient of one channel's kernel.
  // `readable` numbers follow from `grad` on, of this channel and others.
  template <int T>
  void correlate(const float* padded, const Int* offsets, const float* grad, Int readable, float* sums,
                 Int pitch_of_sums) const {
    VectorOf<kLanes>::Register wide[T] = {};
    VectorOf<kGrain>::Register narrow[T] = {};
    for_vectors(out_width, [&](Int x, auto lanes) {
      if constexpr (lanes == kLanes)
        correlate_columns<T, lanes>(padded, offsets, grad, readable, x, wide);
      else
        correlate_columns<T, lanes>(padded, offsets, grad, readable, x, narrow);
    });
    for (int tap = 0; tap < T; ++tap) sums[tap * pitch_of_sums] = total(wide[tap]) + total(narrow[tap]);
  }

  // The part of the columns from x on, of which the last may lie beyond the row.
  template <int T, int L>
  void correlate_columns(const float* padded, const Int* offsets, const float* grad, Int readable, Int x,
                         typename VectorOf<L>::Register (&sums)[T]) const {
    typename VectorOf<L>::Whole inside;
    for (Int lane = 0; lane < L; ++lane) inside[lane] = x + lane < out_width ? -1 : 0;
    for (Int y = 0; y < out_height; ++y) {
      const float* from = padded + y * stride_y * pitch() + x;
      const Int at = y * out_width + x;
      const auto value = load_some<L>(grad + at, readable - at);
      if (x + L <= out_width)
        KERNELWAREHOUSE_UNROLL for (int tap = 0; tap < T; ++tap) sums[tap] += value * load<L>(from + offsets[tap]);
      else  // what lies beyond is not to be multiplied: it may be infinite
        KERNELWAREHOUSE_UNROLL for (int tap = 0; tap < T; ++tap) sums[tap] +=
            inside ? value * load<L>(from + offsets[tap]) : Vector<L>{};
    }
  }

  // Channels that are enough for a thread.
  Int grain() const { return std::max<Int>(1, 65536 / (out_height * out_width * kTaps)); }

  std::vector<Int> tap_offsets() const {
    std::vector<Int> offsets;
    for (Int ky = 0; ky < 3; ++ky)
      for (Int kx = 0; kx < 3; ++kx) offsets.push_back(ky * dilation_y * pitch() + place(kx * dilation_x));
    return offsets;
  }
};

inline Plane plane_of(at::IntArrayRef size, at::IntArrayRef out_size, at::IntArrayRef padding, at::IntArrayRef dilation,
                      at::IntArrayRef stride) {
  constexpr Int most = Int{1} << 24;  // a plane of such sides is counted without an overflow
  bool fits =
      size.size() == 2 && out_size.size() == 2 && padding.size() == 2 && dilation.size() == 2 && stride.size() == 2;
  for (std::size_t axis = 0; fits && axis < 2; ++axis)
    fits = size[axis] > 0 && size[axis] < most && out_size[axis] > 0 && out_size[axis] < most && dilation[axis] > 0 &&
           dilation[axis] < most && padding[axis] >= 0 && padding[axis] <= 2 * dilation[axis] &&
           (stride[axis] == 1 || stride[axis] == 2);
  TORCH_CHECK_VALUE(fits, "inputs of ", size, " and outputs of ", out_size, " with padding ", padding, ", dilation ",
                    dilation, " and stride ", stride,
                    "; two numbers each are wanted: strides of 1 or 2, and no more padding than a kernel reaches");
  return {size[0],    size[1],     out_size[0], out_size[1], padding[0],
          padding[1], dilation[0], dilation[1], stride[0],   stride[1]};
}

// attention [batch, out_groups, taps, n], cells [n, cell_out, 1].
inline Layer check_depthwise(Int batch, const Tensor& attention, const Tensor& cells) {
  check(cells, "cells", {kAny, kAny, 1});
  check_channels("cells", cells.size(1));
  check(attention, "attention", {batch, kAny, kTaps, cells.size(0)});
  return layer_of_cells(attention, cells);
}

inline void check_multiple(Int outputs, Int of) {
  TORCH_CHECK_VALUE(of > 0 && outputs % of == 0, outputs, " output channels are no multiple of ", of);
}

// Calls body(channel of the batch's outputs, its input as padded buffer) for all channels, in parallel.
template <class Body>
void for_padded_channels(const Plane& plane, const Tensor& x, Int out, const Body& body) {
  const Int in = x.size(1), places = plane.height * plane.width;
  const float* x_data = x.const_data_ptr<float>();
  at::parallel_for(0, x.size(0) * out, plane.grain(), [&](Int begin, Int end) {
    Numbers padded(plane.padded_height() * plane.pitch() + kLanes, 0.0f);
    Int filled = -1;
    for (Int channel = begin; channel < end; ++channel) {
      const Int source = channel / out * in + channel % out / (out / in);
      if (source != filled) plane.fill(x_data + source * places, padded.data());
      filled = source;
      body(channel, padded.data());
    }
  });
}

// The kernels of all channels of a batch's outputs, mixed.
class DepthwiseKernels {
 public:
  DepthwiseKernels(const Layer& layer, const Tensor& attention, const Tensor& cells)
      : cell_(layer.cell_out), kernels_(layer.pairs() * kTaps * cell_) {
    Packed packed;
    mix(attention.const_data_ptr<float>(), layer.pairs() * kTaps, layer.n, cells.const_data_ptr<float>(), cell_, cell_,
        kernels_.data(), cell_, packed);
  }

  // The first tap's weight; from one tap's to the next is a pitch.
  const float* of(Int channel) const { return kernels_.data() + channel / cell_ * kTaps * cell_ + channel % cell_; }
  Int pitch() const { return cell_; }

 private:
  const Int cell_;
  Numbers kernels_;
};

// x [batch, in, height, width], attention [batch, out_groups, taps, n], cells [n, cell_out, 1] -> [batch, out, height,
// width].
inline Tensor forward_depthwise(const Tensor& x, const Tensor& attention, const Tensor& cells, at::IntArrayRef out_size,
                                at::IntArrayRef padding, at::IntArrayRef dilation, at::IntArrayRef stride) {
  check(x, "x", {kAny, kAny, kAny, kAny});
  const Layer layer = check_depthwise(x.size(0), attention, cells);
  check_multiple(layer.out_channels(), x.size(1));
  const Plane plane = plane_of(x.sizes().slice(2, 2), out_size, padding, dilation, stride);
  const Int out = layer.out_channels();
  Tensor y = at::empty({layer.batch, out, plane.out_height, plane.out_width}, x.options());
  const DepthwiseKernels kernels(layer, attention, cells);
  float* y_data = y.mutable_data_ptr<float>();
  const std::vector<Int> offsets = plane.tap_offsets();
  for_padded_channels(plane, x, out, [&](Int channel, const float* padded) {
    plane.convolve<kTaps>(padded, offsets.data(), kernels.of(channel), kernels.pitch(),
                          y_data + channel * plane.out_height * plane.out_width);
  });
  return y;
}

// The gradient of the assembled kernels, [batch, out_groups, taps, cell_out].
inline Tensor depthwise_kernel_gradient(const Tensor& grad, const Tensor& x, Int cell, at::IntArrayRef padding,
                                        at::IntArrayRef dilation, at::IntArrayRef stride) {
  check(x, "x", {kAny, kAny, kAny, kAny});
  check(grad, "grad", {x.size(0), kAny, kAny, kAny});
  check_multiple(grad.size(1), x.size(1));
  check_multiple(grad.size(1), cell);
  const Plane plane = plane_of(x.sizes().slice(2, 2), grad.sizes().slice(2, 2), padding, dilation, stride);
  const Int out = grad.size(1), positions = plane.out_height * plane.out_width;
  Tensor sums = at::empty({x.size(0), out / cell, kTaps, cell}, x.options());
  const float* grad_data = grad.const_data_ptr<float>();
  float* to = sums.mutable_data_ptr<float>();
  const std::vector<Int> offsets = plane.tap_offsets();
  for_padded_channels(plane, x, out, [&](Int channel, const float* padded) {
    plane.correlate<kTaps>(padded, offsets.data(), grad_data + channel * positions, grad.numel() - channel * positions,
                           to + channel / cell * kTaps * cell + channel % cell, cell);
  });
  return sums;
}

}  // namespace kernelwarehouse
