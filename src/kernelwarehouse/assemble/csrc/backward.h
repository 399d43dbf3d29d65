// Backward of forward_taps: kernels are mixed again, a block of output channels at a time, for some samples at a time.
//
// Within a block everything is laid out as [row = (sample, out group, segment)][column = (out channel, in channel)]:
//   kernels      = attention x cells              (mixed again, for the gradient of the input)
//   grad_kernels = grad of output x input         (summed over positions)
//   grad of attention += grad_kernels x cells'    grad of cells += attention' x grad_kernels
// Each step runs in parallel over an axis that its results have, so that threads never write the same number.
#pragma once

#include <numeric>
#include <tuple>

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
  std::vector<Int> steps;
  const float* cells;
  bool wants_input;
  Int width;    // output channels of a cell in a block
  Int samples;  // samples at a time

  // Gradients of outputs lie in the grid of the padded input, after as many rows of zeros as the last tap reaches back.
  Int lead() const { return shifts[taps - 1]; }
  Int grad_places() const { return lead() + padded_places; }
  Int in_groups() const { return layer.segments / taps; }
  Int pair_rows() const { return layer.out_groups * layer.segments; }  // rows of one sample
  Int column_pitch() const { return width * layer.cell_in + kWide; }

  bool small() const { return layer.n * layer.cell() <= kFarCache; }  // cells that stay in cache are cheap to read again

  void choose_blocks() {
    // Wide blocks make long sums for the gradient of the input, many samples make packing the cells pay.
    constexpr Int enough_rows = 144;
    const Int room = small() ? kFarCache / 2 : 2 * kFarCache;  // kernels at a time: near, or as many as share packed cells
    const Int sample_rows = padded_places * x_pitch * 2 + grad_places() * grad_pitch;
    const Int most = std::min(layer.batch, std::max<Int>(1, (small() ? 1 : 4) * kFarCache / sample_rows));
    for (width = std::min(layer.cell_out, 4 * kWide);; width = round_up(width / 2, kWide)) {
      samples = std::min(most, std::max<Int>(1, room / (pair_rows() * width * layer.cell_in)));
      if (width <= kWide || samples == most || samples * pair_rows() >= enough_rows) return;
    }
  }
};

// Adds to grad_kernels [segment][channels][cell_in] of one pair: for every segment, the sum over positions of
// grad of output (position, channel) times input (position, in channel).
inline void add_kernel_gradient(const Backward& call, const float* x_rows, const float* grad_rows, Int channels,
                                float* grad_kernels) {
  const Int cell_in = call.layer.cell_in;
  const Int block = std::max<Int>(32, kNearCache / (call.x_pitch + call.grad_pitch));
  for (Int start = 0; start < call.positions; start += block) {
    const Int depth = std::min(block, call.positions - start);
    for (Int segment = 0; segment < call.layer.segments; ++segment) {
      float* to = grad_kernels + segment * call.column_pitch();
      for_panels(cell_in, [&](Int c, Int columns) {
        const AcrossRows product{depth, call.places + start, call.grad_pitch, x_rows + call.steps[segment] + c, call.x_pitch};
        for_row_tiles(channels, [&](Int o, Int tall) {
          const auto targets = starts(tall, [&](Int r) { return to + (o + r) * cell_in + c; });
          multiply_tile(product, tall, columns, grad_rows + o, targets, start > 0);
        });
      });
    }
  }
}

// Adds to the gradient of one sample's input, as rows, what flows through the kernels of one pair: every place of the
// input gathers from the output positions that read it. Only for stride 1.
inline void gather_input_gradient(const Backward& call, const float* kernels, const float* grad_rows, Int channels,
                                  float* grad_x_rows) {
  const Int cell_in = call.layer.cell_in, groups = call.in_groups();
  const Int gap = groups * call.column_pitch() - channels * cell_in;
  std::vector<Int> back;
  for (Int tap = 0; tap < call.taps; ++tap) back.push_back(-call.shifts[tap] * call.grad_pitch);
  for (Int group = 0; group < groups; ++group)
    for_panels(cell_in, [&](Int c, Int columns) {
      const AlongRows product{channels, kernels + group * call.column_pitch() + c, cell_in, gap, call.taps, back.data()};
      float* to = grad_x_rows + group * cell_in + c;
      for_row_tiles(call.inputs, [&](Int place, Int tall) {
        const auto a = starts(tall, [&](Int r) { return grad_rows + call.targets[place + r] * call.grad_pitch; });
        const auto targets = starts(tall, [&](Int r) { return to + call.targets[place + r] * call.x_pitch; });
        multiply_tile(product, tall, columns, a, targets, true);
      });
    });
}

// The same for any stride: every output position scatters to the places it reads.
inline void scatter_input_gradient(const Backward& call, const float* kernels, const float* grad_rows, Int channels,
                                   float* grad_x_rows) {
  const Int cell_in = call.layer.cell_in;
  for_panels(cell_in, [&](Int c, Int columns) {
    for (Int segment = 0; segment < call.layer.segments; ++segment) {
      const AlongRows product{channels, kernels + segment * call.column_pitch() + c, cell_in};
      float* to = grad_x_rows + call.steps[segment] + c;
      for_row_tiles(call.positions, [&](Int position, Int tall) {
        const auto a = starts(tall, [&](Int r) { return grad_rows + call.places[position + r] * call.grad_pitch; });
        const auto targets = starts(tall, [&](Int r) { return to + call.places[position + r] * call.x_pitch; });
        multiply_tile(product, tall, columns, a, targets, true);
      });
    }
  });
}

// grad_attention [rows][n] += grad_kernels [rows][columns] x cells' [columns][n].
inline void add_attention_gradient(const Backward& call, const float* grad_kernels, Int rows, Int first, Int columns,
                                   float* grad_attention) {
  const Int n = call.layer.n, piece = 1024;
  const Int panels = (n + kWide - 1) / kWide;
  at::parallel_for(0, panels, 1, [&](Int begin, Int end) {
    Numbers turned(piece * kWide);
    float sums[kTall * kWide];  // of as many cells as a panel has, where there may be fewer
    for (Int panel = begin; panel < end; ++panel) {
      const Int cells = std::min(kWide, n - panel * kWide), lanes = round_up(cells, kGrain);
      std::fill(turned.begin(), turned.end(), 0.0f);
      for (Int column = 0; column < columns; column += piece) {
        const Int depth = std::min(piece, columns - column);
        transpose(call.cells + panel * kWide * call.layer.cell() + first + column, call.layer.cell(), cells, depth,
                  turned.data(), lanes);
        for_panels(lanes, [&](Int cell, Int width) {
          const AlongRows product{depth, turned.data() + cell, lanes};
          const Int valid = std::min(width, cells - cell);
          const auto targets = starts(kTall, [&](Int r) { return sums + r * kWide; });
          for_row_tiles(rows, [&](Int row, Int tall) {
            const auto a = starts(tall, [&](Int r) { return grad_kernels + (row + r) * call.column_pitch() + column; });
            multiply_tile(product, tall, width, a, targets, false);
            float* to = grad_attention + row * n + panel * kWide + cell;
            for (Int r = 0; r < tall; ++r)
              for (Int c = 0; c < valid; ++c) to[r * n + c] += sums[r * kWide + c];
          });
        });
      }
    }
  });
}

// grad_cells [n][first, first + columns) += attention' [n][rows] x grad_kernels [rows][columns].
inline void add_cell_gradient(const Backward& call, const float* attention, const float* grad_kernels, Int rows, Int first,
                              Int columns, float* grad_cells) {
  const Int n = call.layer.n, panels = (columns + kWide - 1) / kWide, near = 256;  // rows of a panel that stay near
  std::vector<Int> order(near);
  std::iota(order.begin(), order.end(), 0);
  at::parallel_for(0, panels, 1, [&](Int begin, Int end) {
    for (Int panel = begin; panel < end; ++panel) {
      const Int column = panel * kWide;
      for_panels(std::min(kWide, columns - column), [&](Int inside, Int width) {
        float* to = grad_cells + first + column + inside;
        for (Int start = 0; start < rows; start += near) {
          const AcrossRows product{std::min(near, rows - start), order.data(), n,
                                   grad_kernels + start * call.column_pitch() + column + inside, call.column_pitch()};
          for_row_tiles(n, [&](Int j, Int tall) {
            const auto targets = starts(tall, [&](Int r) { return to + (j + r) * call.layer.cell(); });
            multiply_tile(product, tall, width, attention + start * n + j, targets, true);
          });
        }
      });
    }
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

// grad [batch, out, positions] and x [batch, in, places], both contiguous; the rest as in forward_taps.
inline std::tuple<Tensor, Tensor, Tensor> backward_taps(const Tensor& grad, const Tensor& x, const Tensor& attention,
                                                        const Tensor& cells, const Tensor& targets, Int padded_places,
                                                        const Tensor& places, const Tensor& shifts, bool dense,
                                                        bool wants_input) {
  const Int x_pitch = row_pitch(x.size(1));
  Backward call{layer_of_cells(attention, cells),
                x.size(1),
                places.numel(),
                padded_places,
                x_pitch,
                row_pitch(grad.size(1)),
                targets.const_data_ptr<Int>(),
                targets.numel(),
                places.const_data_ptr<Int>(),
                shifts.const_data_ptr<Int>(),
                shifts.numel(),
                dense,
                {},
                cells.const_data_ptr<float>(),
                wants_input,
                0,
                0};
  const Layer& layer = call.layer;
  call.steps = segment_steps(shifts, x_pitch, layer);
  call.choose_blocks();
  Tensor grad_x = wants_input ? at::empty_like(x) : Tensor();
  Tensor grad_attention = at::zeros_like(attention), grad_cells = at::zeros_like(cells);
  const Int x_size = padded_places * x_pitch, grad_size = call.grad_places() * call.grad_pitch;
  const Int out = layer.out_channels();

  Numbers x_rows(call.samples * x_size, 0.0f), grad_rows(call.samples * grad_size, 0.0f), grad_x_rows;
  const Tensor grad_kernels = at::empty({call.samples * call.pair_rows() * call.column_pitch()}, x.options());
  const Tensor kernels = wants_input ? at::empty_like(grad_kernels) : Tensor();
  float* grad_kernel_data = grad_kernels.mutable_data_ptr<float>();
  float* kernel_data = wants_input ? kernels.mutable_data_ptr<float>() : nullptr;
  for (Int start = 0; start < layer.batch; start += call.samples) {
    const Int samples = std::min(call.samples, layer.batch - start), rows = samples * call.pair_rows();
    const float* alpha = attention.const_data_ptr<float>() + start * call.pair_rows() * layer.n;
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      Numbers turned;
      for (Int b = begin; b < end; ++b) {
        sample_to_rows(x.const_data_ptr<float>() + (start + b) * x.stride(0), false, call.in_channels, call.targets,
                       call.inputs, x_rows.data() + b * x_size, x_pitch, turned);
        sample_to_rows(grad.const_data_ptr<float>() + (start + b) * grad.stride(0), false, out, call.places,
                       call.positions, grad_rows.data() + b * grad_size + call.lead() * call.grad_pitch, call.grad_pitch,
                       turned);
      }
    });
    if (wants_input) grad_x_rows.assign(call.samples * x_size, 0.0f);
    for (Int first = 0; first < layer.cell_out; first += call.width) {
      const Int channels = std::min(call.width, layer.cell_out - first), columns = channels * layer.cell_in;
      if (wants_input)
        at::parallel_for(0, (columns + kWide - 1) / kWide, 64, [&](Int begin, Int end) {
          Packed packed;
          const Int from = begin * kWide, count = std::min(end * kWide, columns) - from;
          mix(alpha, rows, layer.n, call.cells + first * layer.cell_in + from, layer.cell(), count, kernel_data + from,
              call.column_pitch(), packed);
        });
      at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
        for (Int pair = begin * layer.out_groups; pair < end * layer.out_groups; ++pair) {
          const Int b = pair / layer.out_groups, offset = pair * layer.segments * call.column_pitch();
          const float* pair_grad = grad_rows.data() + b * grad_size + call.lead() * call.grad_pitch +
                                   pair % layer.out_groups * layer.cell_out + first;
          add_kernel_gradient(call, x_rows.data() + b * x_size, pair_grad, channels, grad_kernel_data + offset);
          if (wants_input) {
            const auto add_input_gradient = call.dense ? gather_input_gradient : scatter_input_gradient;
            add_input_gradient(call, kernel_data + offset, pair_grad, channels, grad_x_rows.data() + b * x_size);
          }
        }
      });
      add_attention_gradient(call, grad_kernel_data, rows, first * layer.cell_in, columns,
                             grad_attention.mutable_data_ptr<float>() + start * call.pair_rows() * layer.n);
      add_cell_gradient(call, alpha, grad_kernel_data, rows, first * layer.cell_in, columns,
                        grad_cells.mutable_data_ptr<float>());
    }
    if (wants_input)
      at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
        for (Int b = begin; b < end; ++b)
          rows_to_sample(grad_x_rows.data() + b * x_size, x_pitch, call.targets, call.inputs, call.in_channels,
                         grad_x.mutable_data_ptr<float>() + (start + b) * x.stride(0));
      });
  }
  return {grad_x, grad_attention, grad_cells};
}

}  // namespace kernelwarehouse
