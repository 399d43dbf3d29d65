// Backward of forward_taps: kernels are mixed again, a block of every cell at a time, for some samples at a time.
//
// Within a block everything is laid out as [row = (sample, out group, segment)][panel of input channels][output
// channel] [input channel of the panel], so that products find what they read one after the other:
//   kernels      = attention x cells              (mixed again, for the gradient of the input)
//   grad_kernels = grad of output x input         (summed over positions; takes the place of the kernels)
//   grad of attention += grad_kernels x cells'    grad of cells += attention' x grad_kernels
// Each step runs in parallel over an axis that its results have, so that threads never write the same number.
#pragma once

#include <optional>
#include <tuple>

#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

struct Backward {
  Layer layer;
  Int in_channels, positions, padded_places;
  Int x_pitch, grad_pitch;
  const Int* targets;
  Int inputs;  // places of the input
  const Int* places;
  const Int* shifts;
  Int taps;
  bool dense;  // every row that a tap of an output position reads is one step of the padded grid: stride 1
  bool wants_input;
  const float* cells;
  std::vector<Int> steps;   // from the row of an output position to what a segment reads
  std::vector<Int> origin;  // where the row of every output position starts, in the input and in its gradient
  std::vector<Int> grad_origin;
  Int width = 0, ins = 0;  // output and input channels of a cell in a block
  Int samples = 0;         // samples at a time

  // Gradients of outputs lie in the grid of the padded input, after as many rows of zeros as the last tap reaches back.
  Int lead() const { return shifts[taps - 1]; }
  Int grad_places() const { return lead() + padded_places; }
  Int in_groups() const { return layer.segments / taps; }
  Int pair_rows() const { return layer.out_groups * layer.segments; }  // rows of one sample
  Int pitch() const { return width * ins + kWide; }                    // of a block's rows; no power of two

  void choose_blocks() {
    // Many samples make packing the cells pay, as long as their inputs and gradients stay in cache; so do large blocks
    // make reading inputs and gradients again for each.
    constexpr Int enough_rows = 192;
    const bool small = layer.n * layer.cell() <= third_level();  // cells that stay in cache are cheap to read again
    const Int sample_rows = padded_places * x_pitch * 2 + grad_places() * grad_pitch;
    const Int most = std::max<Int>(1, (small ? 1 : 4) * third_level() / sample_rows);
    samples = std::min({layer.batch, most, std::max<Int>(1, enough_rows / pair_rows())});
    const Int room = third_level() / 2 / (samples * pair_rows());
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

// The gradient of one pair's kernels [segment][block]: for every segment, the sum over positions of grad of output
// (position, channel), packed as columns, times input (position, in channel).
inline void find_kernel_gradient(const Backward& call, const float* x_rows, const float* grad_columns,
                                 const Block& block, float* grad_kernels) {
  // A panel of the input stays nearest while all output channels use it.
  const Int near = first_level() * 7 / 8 / (kWide + kTall), parts = (call.positions + near - 1) / near;
  const Int part = (call.positions + parts - 1) / parts;
  for (Int start = 0; start < call.positions; start += part) {
    const Int depth = std::min(part, call.positions - start);
    for (Int segment = 0; segment < call.layer.segments; ++segment)
      for_panels(block.ins, [&](Int c, Int columns) {
        const AcrossRows product{depth, x_rows + call.steps[segment] + block.in + c, call.origin.data() + start};
        float* to = grad_kernels + segment * call.pitch() + c * block.width;
        for_row_tiles(block.width, [&](Int o, Int tall) {
          const auto targets = starts(tall, [&](Int r) { return to + (o + r) * columns; });
          multiply_tile(product, tall, columns, grad_columns + o * call.positions + start * tall, targets, start > 0);
        });
      });
  }
}

// Adds to the gradient of one sample's input, as rows, what flows through the kernels of one pair: every place of the
// input gathers from the output positions that read it. Only for stride 1.
inline void gather_input_gradient(const Backward& call, const float* kernels, const float* grad_rows,
                                  const Block& block, float* grad_x_rows) {
  std::vector<Int> back;
  for (Int tap = 0; tap < call.taps; ++tap) back.push_back(-call.shifts[tap] * call.grad_pitch);
  for (Int group = 0; group < call.in_groups(); ++group)
    for_panels(block.ins, [&](Int c, Int columns) {
      const Int gap = call.in_groups() * call.pitch() - block.width * columns;
      const float* b = kernels + group * call.pitch() + c * block.width;
      const AlongRows product{block.width, b, columns, gap, call.taps, back.data()};
      float* to = grad_x_rows + group * call.layer.cell_in + block.in + c;
      for_row_tiles(call.inputs, [&](Int place, Int tall) {
        const auto a = starts(tall, [&](Int r) { return grad_rows + call.targets[place + r] * call.grad_pitch; });
        const auto targets = starts(tall, [&](Int r) { return to + call.targets[place + r] * call.x_pitch; });
        multiply_tile(product, tall, columns, a, targets, true);
      });
    });
}

// The same for any stride: every output position scatters to the places it reads.
inline void scatter_input_gradient(const Backward& call, const float* kernels, const float* grad_rows,
                                   const Block& block, float* grad_x_rows) {
  for_panels(block.ins, [&](Int c, Int columns) {
    for (Int segment = 0; segment < call.layer.segments; ++segment) {
      const AlongRows product{block.width, kernels + segment * call.pitch() + c * block.width, columns};
      float* to = grad_x_rows + call.steps[segment] + block.in + c;
      for_row_tiles(call.positions, [&](Int position, Int tall) {
        const auto a = starts(tall, [&](Int r) { return grad_rows + call.places[position + r] * call.grad_pitch; });
        const auto targets = starts(tall, [&](Int r) { return to + call.places[position + r] * call.x_pitch; });
        multiply_tile(product, tall, columns, a, targets, true);
      });
    }
  });
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

// Some samples at a time: what the products above read, laid out as they want it, and what they find.
class SamplesBackward {
 public:
  explicit SamplesBackward(const Backward& call)
      : call_(call),
        out_(call.layer.out_channels()),
        x_rows_size_(call.padded_places * call.x_pitch),
        grad_rows_size_(call.grad_places() * call.grad_pitch),
        attention_pitch_(round_up(call.layer.n, kGrain)),
        x_rows_(call.samples * x_rows_size_, 0.0f),
        grad_rows_(call.samples * grad_rows_size_, 0.0f),
        grad_columns_(call.samples * out_ * call.positions),
        attention_columns_(call.samples * call.pair_rows() * call.layer.n),
        kernels_(call.samples * call.pair_rows() * call.pitch()) {}

  // x [in, places] and grad [out, positions] of `samples` samples, one after the other, and their attentions.
  void lay_out(const float* x, const float* grad, const float* attention, Int samples) {
    const Int n = call_.layer.n;
    samples_ = samples;
    attention_ = attention;
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      Numbers turned;
      for (Int b = begin; b < end; ++b) {
        sample_to_rows(x + b * call_.in_channels * call_.inputs, false, call_.in_channels, call_.targets, call_.inputs,
                       x_rows_.data() + b * x_rows_size_, call_.x_pitch, turned);
        sample_to_rows(grad + b * out_ * call_.positions, false, out_, call_.places, call_.positions, grad_of(b),
                       call_.grad_pitch, turned);
        pack_grad(b);
      }
    });
    std::vector<Int> lines(rows());
    for (Int row = 0; row < rows(); ++row) lines[row] = row * n;
    pack_columns(attention, lines.data(), rows(), n, attention_columns_.data());
    grad_attention_.assign(rows() * attention_pitch_, 0.0f);
    if (call_.wants_input) grad_x_rows_.assign(samples * x_rows_size_, 0.0f);
  }

  // All gradients that go through a block of the cells. That of the cells is added to what is there, if so told.
  void go_through(const Block& block, bool add, float* grad_cells) {
    if (call_.wants_input)
      at::parallel_for(0, block.width, 1, [&](Int begin, Int end) {
        mix_block(call_, attention_, rows(), block, begin, end, kernels_.data());
      });
    at::parallel_for(0, samples_, 1, [&](Int begin, Int end) {
      for (Int pair = begin * call_.layer.out_groups; pair < end * call_.layer.out_groups; ++pair)
        go_through_kernels(pair, block);
    });
    add_attention_gradient(call_, kernels_.data(), rows(), block, grad_attention_.data(), attention_pitch_);
    find_cell_gradient(call_, attention_columns_.data(), kernels_.data(), rows(), block, add, grad_cells);
  }

  void write_attention_gradient(float* to) const {
    const Int n = call_.layer.n;
    for (Int row = 0; row < rows(); ++row)
      std::copy_n(grad_attention_.data() + row * attention_pitch_, n, to + row * n);
  }

  void write_input_gradient(float* to) const {
    at::parallel_for(0, samples_, 1, [&](Int begin, Int end) {
      for (Int b = begin; b < end; ++b)
        rows_to_sample(grad_x_rows_.data() + b * x_rows_size_, call_.x_pitch, call_.targets, call_.inputs,
                       call_.in_channels, to + b * call_.in_channels * call_.inputs);
    });
  }

 private:
  Int rows() const { return samples_ * call_.pair_rows(); }
  float* grad_of(Int sample) { return grad_rows_.data() + sample * grad_rows_size_ + call_.lead() * call_.grad_pitch; }

  // The gradient of a sample's output once more, block by block as columns.
  void pack_grad(Int sample) {
    const Int cell_out = call_.layer.cell_out;
    float* to = grad_columns_.data() + sample * out_ * call_.positions;
    for (Int cell = 0; cell < out_; cell += cell_out)
      for (Int first = cell; first < cell + cell_out; first += call_.width)
        pack_columns(grad_of(sample) + first, call_.grad_origin.data(), call_.positions,
                     std::min(call_.width, cell + cell_out - first), to + first * call_.positions);
  }

  // From the kernels of a pair to the gradient of its input, and from that of its output to the gradient of its
  // kernels, which takes their place.
  void go_through_kernels(Int pair, const Block& block) {
    const Int groups = call_.layer.out_groups, sample = pair / groups;
    const Int channel = pair % groups * call_.layer.cell_out + block.first;
    float* own = kernels_.data() + pair * call_.layer.segments * call_.pitch();
    if (call_.wants_input) {
      const auto add_input_gradient = call_.dense ? gather_input_gradient : scatter_input_gradient;
      add_input_gradient(call_, own, grad_of(sample) + channel, block, grad_x_rows_.data() + sample * x_rows_size_);
    }
    find_kernel_gradient(call_, x_rows_.data() + sample * x_rows_size_,
                         grad_columns_.data() + (sample * out_ + channel) * call_.positions, block, own);
  }

  const Backward& call_;
  const Int out_, x_rows_size_, grad_rows_size_, attention_pitch_;
  Int samples_ = 0;
  const float* attention_ = nullptr;
  Numbers x_rows_, grad_rows_, grad_columns_, attention_columns_, kernels_;
  Numbers grad_attention_, grad_x_rows_;
};

// grad [batch, out, positions] and x [batch, in, places], both contiguous; the rest as in forward_taps. The gradient
// of the cells is added to `total` where that is given.
inline std::tuple<Tensor, Tensor, Tensor> backward_taps(const Tensor& grad, const Tensor& x, const Tensor& attention,
                                                        const Tensor& cells, const Tensor& targets, Int padded_places,
                                                        const Tensor& places, const Tensor& shifts, bool dense,
                                                        bool wants_input, const std::optional<Tensor>& total) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  check_tables(layer, targets, padded_places, places, shifts);
  check_images(x, "x", layer.batch, layer.segments / shifts.numel() * layer.cell_in, targets.numel());
  check_images(grad, "grad", layer.batch, layer.out_channels(), places.numel());
  if (total) check(*total, "total", cells.sizes());
  const Int x_pitch = row_pitch(x.size(1)), grad_pitch = row_pitch(grad.size(1)), positions = places.numel();
  Backward call{.layer = layer,
                .in_channels = x.size(1),
                .positions = positions,
                .padded_places = padded_places,
                .x_pitch = x_pitch,
                .grad_pitch = grad_pitch,
                .targets = targets.const_data_ptr<Int>(),
                .inputs = targets.numel(),
                .places = places.const_data_ptr<Int>(),
                .shifts = shifts.const_data_ptr<Int>(),
                .taps = shifts.numel(),
                .dense = dense,
                .wants_input = wants_input,
                .cells = cells.const_data_ptr<float>(),
                .steps = segment_steps(shifts, x_pitch, layer)};
  for (Int position = 0; position < positions; ++position) {
    call.origin.push_back(call.places[position] * x_pitch);
    call.grad_origin.push_back(call.places[position] * grad_pitch);
  }
  call.choose_blocks();
  Tensor grad_x = wants_input ? at::empty_like(x) : Tensor();
  Tensor grad_attention = at::empty_like(attention), grad_cells = total ? *total : at::empty_like(cells);
  const Int x_size = x.size(1) * call.inputs, grad_size = grad.size(1) * positions;
  const Int attention_size = call.pair_rows() * layer.n;

  SamplesBackward some(call);
  for (Int start = 0; start < layer.batch; start += call.samples) {
    some.lay_out(x.const_data_ptr<float>() + start * x_size, grad.const_data_ptr<float>() + start * grad_size,
                 attention.const_data_ptr<float>() + start * attention_size,
                 std::min(call.samples, layer.batch - start));
    for (Int first = 0; first < layer.cell_out; first += call.width)
      for (Int in = 0; in < layer.cell_in; in += call.ins) {
        const Int width = std::min(call.width, layer.cell_out - first), ins = std::min(call.ins, layer.cell_in - in);
        some.go_through({first, width, in, ins}, total || start > 0, grad_cells.mutable_data_ptr<float>());
      }
    some.write_attention_gradient(grad_attention.mutable_data_ptr<float>() + start * attention_size);
    if (wants_input) some.write_input_gradient(grad_x.mutable_data_ptr<float>() + start * x_size);
  }
  // What was handed in is not handed back: an operator's results are new.
  return {grad_x, grad_attention, total ? Tensor() : grad_cells};
}

}  // namespace kernelwarehouse
