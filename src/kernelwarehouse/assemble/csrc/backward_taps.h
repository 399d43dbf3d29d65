// Backward of forward_taps: inputs and gradients as rows, which every kernel position goes through (see ops.cpp).
#pragma once

#include "backward.h"

namespace kernelwarehouse {

class TapsImages {
 public:
  struct Scratch {};

  // The tables of ops.cpp. `dense`: every row that a tap of an output position reads is one step of the padded grid.
  TapsImages(Backward& call, Int in_channels, const Tensor& targets, Int padded_places, const Tensor& places,
             const Tensor& shifts, bool dense)
      : call_(call),
        in_channels_(in_channels),
        out_(call.layer.out_channels()),
        positions_(places.numel()),
        inputs_(targets.numel()),
        taps_(shifts.numel()),
        x_pitch_(row_pitch(in_channels_)),
        grad_pitch_(row_pitch(out_)),
        targets_(targets.const_data_ptr<Int>()),
        places_(places.const_data_ptr<Int>()),
        shifts_(shifts.const_data_ptr<Int>()),
        dense_(dense),
        steps_(segment_steps(shifts, x_pitch_, call.layer)),
        x_rows_size_(padded_places * x_pitch_),
        grad_rows_size_((lead() + padded_places) * grad_pitch_) {
    for (Int position = 0; position < positions_; ++position) {
      origin_.push_back(places_[position] * x_pitch_);
      grad_origin_.push_back(places_[position] * grad_pitch_);
    }
    call.choose_blocks(2 * x_rows_size_ + grad_rows_size_, call.layer.cell());
    x_rows_.assign(call.samples * x_rows_size_, 0.0f);
    grad_rows_.assign(call.samples * grad_rows_size_, 0.0f);
    grad_columns_.resize(call.samples * out_ * positions_);
  }

  void lay_out(Int sample, const float* x, const float* grad) {
    Numbers turned;
    sample_to_rows(x, false, in_channels_, targets_, inputs_, x_rows_.data() + sample * x_rows_size_, x_pitch_, turned);
    sample_to_rows(grad, false, out_, places_, positions_, grad_of(sample), grad_pitch_, turned);
    pack_grad(sample);
  }

  void begin_input_gradient(Int samples, float*) { grad_x_rows_.assign(samples * x_rows_size_, 0.0f); }

  void go_through(Int sample, Int channel, const Block& block, float* kernels, Scratch&) {
    if (call_.wants_input) {
      float* grad_x_rows = grad_x_rows_.data() + sample * x_rows_size_;
      if (dense_)
        gather_input_gradient(kernels, grad_of(sample) + channel, block, grad_x_rows);
      else
        scatter_input_gradient(kernels, grad_of(sample) + channel, block, grad_x_rows);
    }
    find_kernel_gradient(x_rows_.data() + sample * x_rows_size_,
                         grad_columns_.data() + (sample * out_ + channel) * positions_, block, kernels);
  }

  void write_input_gradient(Int sample, float* to) const {
    rows_to_sample(grad_x_rows_.data() + sample * x_rows_size_, x_pitch_, targets_, inputs_, in_channels_, to);
  }

 private:
  // Gradients of outputs lie in the grid of the padded input, after as many rows of zeros as the last tap reaches back.
  Int lead() const { return shifts_[taps_ - 1]; }
  Int in_groups() const { return call_.layer.segments / taps_; }
  float* grad_of(Int sample) { return grad_rows_.data() + sample * grad_rows_size_ + lead() * grad_pitch_; }

  // The gradient of a sample's output once more, block by block as columns.
  void pack_grad(Int sample) {
    const Int cell_out = call_.layer.cell_out;
    float* to = grad_columns_.data() + sample * out_ * positions_;
    for (Int cell = 0; cell < out_; cell += cell_out)
      for (Int first = cell; first < cell + cell_out; first += call_.width)
        pack_columns(grad_of(sample) + first, grad_origin_.data(), positions_,
                     std::min(call_.width, cell + cell_out - first), to + first * positions_);
  }

  // The gradient of one pair's kernels [segment][block]: for every segment, the sum over positions of grad of output
  // (position, channel), packed as columns, times input (position, in channel).
  void find_kernel_gradient(const float* x_rows, const float* grad_columns, const Block& block,
                            float* grad_kernels) const {
    // A panel of the input stays nearest while all output channels use it.
    const Int near = first_level() * 7 / 8 / (kWide + kTall), parts = (positions_ + near - 1) / near;
    const Int part = (positions_ + parts - 1) / parts;
    for (Int start = 0; start < positions_; start += part) {
      const Int depth = std::min(part, positions_ - start);
      for (Int segment = 0; segment < call_.layer.segments; ++segment)
        for_panels(block.ins, [&](Int c, Int columns) {
          const AcrossRows product{depth, x_rows + steps_[segment] + block.in + c, origin_.data() + start};
          float* to = grad_kernels + segment * call_.pitch() + c * block.width;
          for_row_tiles(block.width, [&](Int o, Int tall) {
            const auto targets = starts(tall, [&](Int r) { return to + (o + r) * columns; });
            multiply_tile(product, tall, columns, grad_columns + o * positions_ + start * tall, targets, start > 0);
          });
        });
    }
  }

  // Adds to the gradient of one sample's input, as rows, what flows through the kernels of one pair: every place of the
  // input gathers from the output positions that read it. Only for stride 1.
  void gather_input_gradient(const float* kernels, const float* grad_rows, const Block& block,
                             float* grad_x_rows) const {
    std::vector<Int> back;
    for (Int tap = 0; tap < taps_; ++tap) back.push_back(-shifts_[tap] * grad_pitch_);
    for (Int group = 0; group < in_groups(); ++group)
      for_panels(block.ins, [&](Int c, Int columns) {
        const Int gap = in_groups() * call_.pitch() - block.width * columns;
        const float* b = kernels + group * call_.pitch() + c * block.width;
        const AlongRows product{block.width, b, columns, gap, taps_, back.data()};
        float* to = grad_x_rows + group * call_.layer.cell_in + block.in + c;
        for_row_tiles(inputs_, [&](Int place, Int tall) {
          const auto a = starts(tall, [&](Int r) { return grad_rows + targets_[place + r] * grad_pitch_; });
          const auto targets = starts(tall, [&](Int r) { return to + targets_[place + r] * x_pitch_; });
          multiply_tile(product, tall, columns, a, targets, true);
        });
      });
  }

  // The same for any stride: every output position scatters to the places it reads.
  void scatter_input_gradient(const float* kernels, const float* grad_rows, const Block& block,
                              float* grad_x_rows) const {
    for_panels(block.ins, [&](Int c, Int columns) {
      for (Int segment = 0; segment < call_.layer.segments; ++segment) {
        const AlongRows product{block.width, kernels + segment * call_.pitch() + c * block.width, columns};
        float* to = grad_x_rows + steps_[segment] + block.in + c;
        for_row_tiles(positions_, [&](Int position, Int tall) {
          const auto a = starts(tall, [&](Int r) { return grad_rows + places_[position + r] * grad_pitch_; });
          const auto targets = starts(tall, [&](Int r) { return to + places_[position + r] * x_pitch_; });
          multiply_tile(product, tall, columns, a, targets, true);
        });
      }
    });
  }

  const Backward& call_;
  const Int in_channels_, out_, positions_, inputs_, taps_;
  const Int x_pitch_, grad_pitch_;
  const Int* targets_;
  const Int* places_;
  const Int* shifts_;
  const bool dense_;
  const std::vector<Int> steps_;  // from the row of an output position to what a segment reads
  const Int x_rows_size_, grad_rows_size_;
  std::vector<Int> origin_;  // where the row of every output position starts, in the input and in its gradient
  std::vector<Int> grad_origin_;
  Numbers x_rows_, grad_rows_, grad_columns_, grad_x_rows_;
};

// grad [batch, out, positions] and x [batch, in, places], both contiguous; the rest as in forward_taps.
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
  Backward call{.layer = layer, .wants_input = wants_input, .cells = cells.const_data_ptr<float>()};
  TapsImages images(call, x.size(1), targets, padded_places, places, shifts, dense);
  return backward(call, images, grad, x, attention, cells, total);
}

}  // namespace kernelwarehouse
