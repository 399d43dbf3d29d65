// Backward: kernels are mixed again, a block of every cell at a time, for some samples at a time.
//
// Within a block everything is laid out as [row = (sample, out group, segment)][panel of input channels][output
// channel] [input channel of the panel], so that products find what they read one after the other:
//   kernels      = attention x cells              (mixed again, for the gradient of the input)
//   grad_kernels = grad of output x input         (summed over positions; takes the place of the kernels)
//   grad of attention += grad_kernels x cells'    grad of cells += attention' x grad_kernels
// Each step runs in parallel over an axis that its results have, so that threads never write the same number.
//
// The second step, and the gradient of the input, are where ways to convolve differ: backward_taps.h,
// winograd_backward.h, backward_planes.h.
#pragma once

#include <optional>
#include <tuple>

#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

struct Backward {
  Layer layer;
  bool wants_input;
  const float* cells;
  Int width = 0, ins = 0;  // output and input channels of a cell in a block
  Int samples = 0;         // samples at a time

  Int pair_rows() const { return layer.out_groups * layer.segments; }  // rows of one sample
  Int pitch() const { return width * ins + kWide; }                    // of a block's rows; no power of two

  // So that `sample_numbers` for each sample stay in cache, and a block has at most so many numbers. Threads share the
  // samples, and each has a cache of its own for them, as long as all together do not take much memory.
  void choose_blocks(Int sample_numbers, Int most_in_block) {
    // Many samples make packing the cells pay, as long as their inputs and gradients stay in cache; so do large blocks
    // make reading inputs and gradients again for each.
    constexpr Int enough_rows = 192, enough_caches = 8;
    const Int threads = at::get_num_threads();
    const bool small = layer.n * layer.cell() <= third_level();  // cells that stay in cache are cheap to read again
    const Int near = std::max<Int>(1, (small ? 1 : 4) * third_level() / sample_numbers);
    const Int fitting = std::max(near, std::min(near * threads, 16 * kBlock / sample_numbers));
    const Int most = std::min({fitting, std::max(enough_rows / pair_rows(), threads), layer.batch});
    const Int times = (layer.batch + most - 1) / most, even = (layer.batch + times - 1) / times;
    samples = std::min({round_up(even, threads), layer.batch, std::max(even, fitting)});
    const Int caches = std::min({samples, threads, enough_caches});
    const Int room = std::min(most_in_block, caches * third_level() / 2 / (samples * pair_rows()));
    width = std::min(layer.cell_out, 4 * kWide);
    ins = layer.cell_in;
    while (width * ins > room && (width > kWide || ins > kWide)) {
      Int& halved = ins > 2 * kWide || width <= kWide ? ins : width;
      halved = round_up(halved / 2, kWide);
    }
  }
};

// Rows of a block, mixed for the output channels [begin, end) of it.
inline void mix_block(const Backward& call, const float* attention, Int rows, const Block& block, Int begin, Int end,
                      float* to) {
  const Int n = call.layer.n, cell_in = call.layer.cell_in;
  // As many output channels in a row as stay nearest while all rows use them.
  const Int together = std::min(end - begin, std::max<Int>(1, first_level() / 2 / (n * kWide)));
  Numbers packed(together * n * block.ins);
  for (Int o = begin; o < end; o += together) {
    const Int count = std::min(together, end - o);
    for (Int i = 0; i < count; ++i)
      pack_panels(call.cells + (block.first + o + i) * cell_in + block.in, call.layer.cell(), n, block.ins,
                  packed.data() + i * n * block.ins);
    for_panels(block.ins, [&](Int c, Int columns) {
      const AlongRows product{.depth = n,
                              .b = packed.data() + c * n,
                              .pitch = columns,
                              .gap = n * (block.ins - columns),
                              .repeats = count,
                              .to_step = columns};
      multiply_panel(product, attention, n, rows, columns, to + c * block.width + o * columns, call.pitch());
    });
  }
}

// grad_attention [rows][n, rounded up] += grad_kernels [rows][block] x cells' [block][n].
inline void add_attention_gradient(const Backward& call, const float* grad_kernels, Int rows, const Block& block,
                                   float* grad_attention, Int pitch) {
  const Int n = call.layer.n, cell_in = call.layer.cell_in;
  at::parallel_for(0, (n + kWide - 1) / kWide, 1, [&](Int begin, Int end) {
    Numbers turned(block.width * kWide * kWide);
    for (Int first = begin * kWide; first < std::min(n, end * kWide); first += kWide) {
      const Int cells = std::min(kWide, n - first), lanes = round_up(cells, kGrain);
      std::fill(turned.begin(), turned.end(), 0.0f);
      for_panels(block.ins, [&](Int c, Int columns) {
        const float* from = call.cells + first * call.layer.cell() + block.first * cell_in + block.in + c;
        for (Int o = 0; o < block.width; ++o) {
          for (Int j = 0; j < cells; ++j) __builtin_prefetch(from + j * call.layer.cell() + (o + 2) * cell_in);
          transpose(from + o * cell_in, call.layer.cell(), cells, columns, turned.data() + o * columns * lanes, lanes);
        }
        for_panels(lanes, [&](Int cell, Int width) {
          const AlongRows product{block.width * columns, turned.data() + cell, lanes};
          multiply_panel(product, grad_kernels + c * block.width, call.pitch(), rows, width,
                         grad_attention + first + cell, pitch, true);
        });
      });
    }
  });
}

// grad_cells [n][block] (+)= attention' [n][rows], packed as columns, x grad_kernels [rows][block].
inline void find_cell_gradient(const Backward& call, const float* attention_columns, const float* grad_kernels,
                               Int rows, const Block& block, bool add, float* grad_cells) {
  const Int n = call.layer.n, cell_in = call.layer.cell_in;
  std::vector<Int> lines(rows);
  for (Int row = 0; row < rows; ++row) lines[row] = row * call.pitch();
  at::parallel_for(0, block.width, 1, [&](Int begin, Int end) {
    for (Int o = begin; o < end; ++o)
      for_panels(block.ins, [&](Int c, Int columns) {
        const AcrossRows product{rows, grad_kernels + c * block.width + o * columns, lines.data()};
        float* to = grad_cells + (block.first + o) * cell_in + block.in + c;
        for_row_tiles(n, [&](Int j, Int tall) {
          const auto targets = starts(tall, [&](Int r) { return to + (j + r) * call.layer.cell(); });
          multiply_tile(product, tall, columns, attention_columns + j * rows, targets, add);
        });
      });
  });
}

// The rows of one sample back to [channels, places], without the padding.
inline void rows_to_sample(const float* rows, Int pitch, const Int* targets, Int places, Int channels, float* x) {
  Numbers gathered(kWide * pitch);
  for (Int place = 0; place < places; place += kWide) {
    const Int count = std::min(kWide, places - place);
    for (Int i = 0; i < count; ++i)
      std::memcpy(gathered.data() + i * pitch, rows + targets[place + i] * pitch, channels * sizeof(float));
    transpose(gathered.data(), pitch, count, channels, x + place, places);
  }
}

// Some samples at a time. How images are laid out and convolved is up to `Images`:
//   lay_out(sample, x [in, places], grad [out, positions])
//   begin_input_gradient(samples, to [samples, in, places]), which may be written at once or in the end
//   go_through(sample, channel, block, kernels, scratch): from the kernels of a pair [segment][block], for the output
//     channels from `channel` on, to the gradient of its input, and from that of its output to the gradient of its
//     kernels, which takes their place; `Images::Scratch` is a thread's own
//   write_input_gradient(sample, to [in, places])
template <class Images>
class SamplesBackward {
 public:
  SamplesBackward(const Backward& call, Images& images)
      : call_(call),
        images_(images),
        attention_pitch_(round_up(call.layer.n, kGrain)),
        attention_columns_(call.samples * call.pair_rows() * call.layer.n),
        kernels_(call.samples * call.pair_rows() * call.pitch()) {}

  // x and grad of `samples` samples, so many numbers each, one after the other, their attentions, and where the
  // gradient of x goes.
  void lay_out(const float* x, Int x_size, const float* grad, Int grad_size, const float* attention, Int samples,
               float* grad_x) {
    const Int n = call_.layer.n;
    samples_ = samples;
    attention_ = attention;
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      for (Int b = begin; b < end; ++b) images_.lay_out(b, x + b * x_size, grad + b * grad_size);
    });
    std::vector<Int> lines(rows());
    for (Int row = 0; row < rows(); ++row) lines[row] = row * n;
    pack_columns(attention, lines.data(), rows(), n, attention_columns_.data());
    grad_attention_.assign(rows() * attention_pitch_, 0.0f);
    if (call_.wants_input) images_.begin_input_gradient(samples, grad_x);
  }

  // All gradients that go through a block of the cells. That of the cells is added to what is there, if so told.
  void go_through(const Block& block, bool add, float* grad_cells) {
    if (call_.wants_input)
      at::parallel_for(0, block.width, 1, [&](Int begin, Int end) {
        mix_block(call_, attention_, rows(), block, begin, end, kernels_.data());
      });
    at::parallel_for(0, samples_, 1, [&](Int begin, Int end) {
      typename Images::Scratch scratch;
      const Int groups = call_.layer.out_groups;
      for (Int pair = begin * groups; pair < end * groups; ++pair)
        images_.go_through(pair / groups, pair % groups * call_.layer.cell_out + block.first, block,
                           kernels_.data() + pair * call_.layer.segments * call_.pitch(), scratch);
    });
    add_attention_gradient(call_, kernels_.data(), rows(), block, grad_attention_.data(), attention_pitch_);
    find_cell_gradient(call_, attention_columns_.data(), kernels_.data(), rows(), block, add, grad_cells);
  }

  void write_attention_gradient(float* to) const {
    const Int n = call_.layer.n;
    for (Int row = 0; row < rows(); ++row)
      std::copy_n(grad_attention_.data() + row * attention_pitch_, n, to + row * n);
  }

  void write_input_gradient(float* to, Int size) const {
    at::parallel_for(0, samples_, 1, [&](Int begin, Int end) {
      for (Int b = begin; b < end; ++b) images_.write_input_gradient(b, to + b * size);
    });
  }

 private:
  Int rows() const { return samples_ * call_.pair_rows(); }

  const Backward& call_;
  Images& images_;
  const Int attention_pitch_;
  Int samples_ = 0;
  const float* attention_ = nullptr;
  Numbers attention_columns_, kernels_, grad_attention_;
};

// grad and x [batch, ...], both contiguous. The gradient of the cells is added to `total` where that is given.
template <class Images>
std::tuple<Tensor, Tensor, Tensor> backward(const Backward& call, Images& images, const Tensor& grad, const Tensor& x,
                                            const Tensor& attention, const Tensor& cells,
                                            const std::optional<Tensor>& total) {
  const Layer& layer = call.layer;
  Tensor grad_x = call.wants_input ? at::empty_like(x) : Tensor();
  Tensor grad_attention = at::empty_like(attention), grad_cells = total ? *total : at::empty_like(cells);
  const Int x_size = x.numel() / layer.batch, grad_size = grad.numel() / layer.batch;
  const Int attention_size = call.pair_rows() * layer.n;

  SamplesBackward<Images> some(call, images);
  for (Int start = 0; start < layer.batch; start += call.samples) {
    float* to = call.wants_input ? grad_x.mutable_data_ptr<float>() + start * x_size : nullptr;
    some.lay_out(x.const_data_ptr<float>() + start * x_size, x_size, grad.const_data_ptr<float>() + start * grad_size,
                 grad_size, attention.const_data_ptr<float>() + start * attention_size,
                 std::min(call.samples, layer.batch - start), to);
    for (Int first = 0; first < layer.cell_out; first += call.width)
      for (Int in = 0; in < layer.cell_in; in += call.ins) {
        const Int width = std::min(call.width, layer.cell_out - first), ins = std::min(call.ins, layer.cell_in - in);
        some.go_through({first, width, in, ins}, total || start > 0, grad_cells.mutable_data_ptr<float>());
      }
    some.write_attention_gradient(grad_attention.mutable_data_ptr<float>() + start * attention_size);
    if (call.wants_input) some.write_input_gradient(to, x_size);
  }
  // What was handed in is not handed back: an operator's results are new.
  return {grad_x, grad_attention, total ? Tensor() : grad_cells};
}

}  // namespace kernelwarehouse
