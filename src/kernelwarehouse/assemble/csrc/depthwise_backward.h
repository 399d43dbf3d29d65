// What flows back through depth-wise 3x3 layers to their inputs.
//
// A place of the input gathers from the outputs that have read it. With a stride of s these are neighbours for every
// s-th place of a row: so each phase of a row is a sum of shifted rows of the gradient, which stays in the first-level
// cache, and phases are put together at the end.
#pragma once

#include <array>

#include "depthwise.h"

namespace kernelwarehouse {

// Of two phases, alternately, so many numbers in all; or added to what is there.
inline void interleave(const float* even, const float* odd, Int count, bool add, float* to) {
  const auto put = [&](Int at, const Vector<8>& value) { store(to + at, add ? load<8>(to + at) + value : value); };
  Int x = 0;
  for (; x + 16 <= count; x += 16, even += 8, odd += 8) {
    const Vector<8> first = load<8>(even), second = load<8>(odd);
    put(x, shuffle<0, 8, 1, 9, 2, 10, 3, 11>(first, second));
    put(x + 8, shuffle<4, 12, 5, 13, 6, 14, 7, 15>(first, second));
  }
  for (; x < count; ++x) to[x] = (x % 2 == 0 ? *even++ : *odd++) + (add ? to[x] : 0.0f);
}

class InputGradient {
 public:
  // For one thread: the gradient of an output channel with margins that are zero and stay so, and phases of results.
  struct Scratch {
    Numbers padded, phases;

    explicit Scratch(const InputGradient& flow)
        : padded(flow.down_.extent * flow.pitch() + kLanes, 0.0f), phases(flow.plane_.height * flow.line_pitch()) {}
  };

  explicit InputGradient(const Plane& plane)
      : plane_(plane),
        down_(plane.height, plane.out_height, plane.stride_y, plane.pad_y, plane.dilation_y),
        across_(plane.width, plane.out_width, plane.stride_x, plane.pad_x, plane.dilation_x) {}

  // What flows from one channel of the outputs, whose kernel is weights[tap * weight_pitch], to its input.
  void flow(const float* grad, const float* weights, Int weight_pitch, bool add, float* to, Scratch& scratch) const {
    for (Int y = 0; y < plane_.out_height; ++y)
      std::copy_n(grad + y * plane_.out_width, plane_.out_width,
                  scratch.padded.data() + (down_.margin + y) * pitch() + across_.margin);
    // Rows that are made whole, from the first to the last, go where they belong at once: what vectors write beyond the
    // end of one, the next one overwrites. Others wait in rows that hold whole vectors.
    const bool at_once = plane_.stride_y == 1 && plane_.stride_x == 1 && !add;
    for (Int y = 0; y < plane_.stride_y && y < plane_.height; ++y)
      for (Int x = 0; x < plane_.stride_x; ++x) {
        const Int start = y * line_pitch() + x * phase_pitch();
        if (at_once)
          gather(y, x, scratch.padded.data(), weights, weight_pitch, to, plane_.width, plane_.height * plane_.width);
        else
          gather(y, x, scratch.padded.data(), weights, weight_pitch, scratch.phases.data() + start, line_pitch(),
                 static_cast<Int>(scratch.phases.size()) - start);
      }
    if (at_once) return;
    for (Int y = 0; y < plane_.height; ++y, to += plane_.width) {
      const float* line = scratch.phases.data() + y * line_pitch();
      if (plane_.stride_x == 2)
        interleave(line, line + phase_pitch(), plane_.width, add, to);
      else
        for (Int x = 0; x < plane_.width; ++x) to[x] = add ? to[x] + line[x] : line[x];
    }
  }

 private:
  // Of a phase, places stride * i + phase: through which taps they are read, and by outputs i + step.
  struct Reader {
    Int tap, step;
  };
  struct Axis {
    Int count;                   // places of a phase, at most
    Int margin = 0, extent = 0;  // of the padded gradient: zeros before it, and all that is looked at
    std::array<std::vector<Reader>, 2> readers;

    Axis(Int size, Int out_size, Int stride, Int padding, Int dilation) : count((size + stride - 1) / stride) {
      Int last = out_size;
      for (Int phase = 0; phase < stride; ++phase)
        for (Int tap = 0; tap < 3; ++tap) {
          const Int place = phase + padding - tap * dilation, step = place / stride;
          if (place % stride != 0) continue;
          readers[phase].push_back({tap, step});
          margin = std::max(margin, -step);
          last = std::max(last, count + step);
        }
      extent = margin + last;
    }
  };

  Int pitch() const { return across_.extent + kLanes; }  // of the padded gradient: loads run over the end of a row
  Int phase_pitch() const { return round_up(across_.count, kLanes); }
  Int line_pitch() const { return plane_.stride_x * phase_pitch(); }

  // Phase `y` of the rows and `x` of their places, to rows that are so far apart for neighbours. Vectors may write
  // beyond the end of a row, but not more than `room` numbers from the first one on.
  void gather(Int y, Int x, const float* padded, const float* weights, Int weight_pitch, float* to, Int to_pitch,
              Int room) const {
    Int count = 0, offsets[kTaps];
    float factors[kTaps];
    for (const Reader& line : down_.readers[y])
      for (const Reader& reader : across_.readers[x]) {
        offsets[count] = (down_.margin + line.step) * pitch() + across_.margin + reader.step;
        factors[count++] = weights[(3 * line.tap + reader.tap) * weight_pitch];
      }
    const Int step = plane_.stride_y * to_pitch;
    if (count == 0) {  // a dilation that is a multiple of the stride passes these by
      for (Int i = y, at = 0; i < plane_.height; i += plane_.stride_y, at += step)
        std::fill_n(to + at, across_.count, 0.0f);
      return;
    }
    with_constant<kTaps>(count, [&](auto taps) {
      constexpr int known = taps;
      Int own_offsets[known];
      float own_factors[known];
      std::copy_n(offsets, known, own_offsets);
      std::copy_n(factors, known, own_factors);
      for (Int i = 0, at = 0; plane_.stride_y * i + y < plane_.height; ++i, at += step)
        for_vectors(across_.count, [&](Int j, auto lanes) {
          const float* from = padded + i * pitch() + j;
          Vector<lanes> sum = {};
          KERNELWAREHOUSE_UNROLL for (int tap = 0; tap < known; ++tap) sum +=
              own_factors[tap] * load<lanes>(from + own_offsets[tap]);
          store_some(to + at + j, sum, room - at - j);
        });
    });
  }

  const Plane plane_;
  const Axis down_, across_;
};

// grad [batch, out, height, width] -> [batch, in, *size]; attention and cells as in forward_depthwise.
inline Tensor depthwise_input_gradient(const Tensor& grad, const Tensor& attention, const Tensor& cells, Int in,
                                       at::IntArrayRef size, at::IntArrayRef padding, at::IntArrayRef dilation,
                                       at::IntArrayRef stride) {
  check(grad, "grad", {kAny, kAny, kAny, kAny});
  const Layer layer = check_depthwise(grad.size(0), attention, cells);
  const Int out = layer.out_channels();
  check(grad, "grad", {kAny, out, kAny, kAny});
  check_multiple(out, in);
  const Plane plane = plane_of(size, grad.sizes().slice(2, 2), padding, dilation, stride);
  const InputGradient gradient(plane);
  Tensor result = at::empty({layer.batch, in, plane.height, plane.width}, grad.options());
  const DepthwiseKernels kernels(layer, attention, cells);
  const float* grad_data = grad.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  const Int shared = out / in, positions = plane.out_height * plane.out_width, places = plane.height * plane.width;
  at::parallel_for(0, layer.batch * in, plane.grain(), [&](Int begin, Int end) {
    InputGradient::Scratch scratch(gradient);
    for (Int channel = begin; channel < end; ++channel)
      for (Int i = 0; i < shared; ++i) {
        const Int output = channel * shared + i;
        gradient.flow(grad_data + output * positions, kernels.of(output), kernels.pitch(), i > 0, to + channel * places,
                      scratch);
      }
  });
  return result;
}

}  // namespace kernelwarehouse
