// Backward of forward_winograd: the transposes of its steps, in the opposite order.
#pragma once

#include "backward.h"
#include "winograd.h"

namespace kernelwarehouse {

class WinogradImages {
 public:
  // For the points of a block of kernels, its gradients, and what tiles of a strip give and get.
  struct Scratch {
    Numbers kernels, grad_kernels, inputs, grads, grad_inputs;
  };

  WinogradImages(Backward& call, const Tiling& tiling, Int in_channels)
      : call_(call),
        tiling_(tiling),
        in_channels_(in_channels),
        out_(call.layer.out_channels()),
        x_pitch_(row_pitch(in_channels)),
        grad_pitch_(row_pitch(out_)),
        x_rows_size_(tiling.input_places() * x_pitch_),
        grad_rows_size_(tiling.output_places() * grad_pitch_),
        inputs_(tiling.input_rows()),
        outputs_(tiling.output_rows()) {
    call.choose_blocks(2 * x_rows_size_ + grad_rows_size_, second_level() / 2 / kPoints);
    strip_ = tiling.rows_together(kPoints * std::max(call.ins, call.width));
    x_rows_.assign(call.samples * x_rows_size_, 0.0f);
    grad_rows_.assign(call.samples * grad_rows_size_, 0.0f);
  }

  void lay_out(Int sample, const float* x, const float* grad) {
    Numbers turned;
    sample_to_rows(x, false, in_channels_, inputs_.data(), static_cast<Int>(inputs_.size()),
                   x_rows_.data() + sample * x_rows_size_, x_pitch_, turned);
    sample_to_rows(grad, false, out_, outputs_.data(), static_cast<Int>(outputs_.size()),
                   grad_rows_.data() + sample * grad_rows_size_, grad_pitch_, turned);
  }

  void begin_input_gradient(Int samples, float*) { grad_x_rows_.assign(samples * x_rows_size_, 0.0f); }

  void go_through(Int sample, Int channel, const Block& block, float* kernels, Scratch& scratch) {
    const Int size = block.width * block.ins, groups = call_.layer.segments / 9;
    scratch.kernels.resize(kPoints * point_pitch(size));
    scratch.grad_kernels.resize(kPoints * point_pitch(size));
    for (Int group = 0; group < groups; ++group) {
      const Square<float> own{kernels + group * call_.pitch(), 3 * groups * call_.pitch(), groups * call_.pitch()};
      if (call_.wants_input)
        transform<KernelToPoints>({own.at, own.row, own.column}, points(scratch.kernels.data(), point_pitch(size)),
                                  size);
      const Int in = sample * x_rows_size_ + group * call_.layer.cell_in + block.in;
      for (Int row = 0; row < tiling_.down; row += strip_)
        go_through_strip(in, grad_rows_.data() + sample * grad_rows_size_ + channel, block, row,
                         std::min(strip_, tiling_.down - row), scratch);
      transform<PointsToKernelGradient>(points<const float>(scratch.grad_kernels.data(), point_pitch(size)), own, size);
    }
  }

  void write_input_gradient(Int sample, float* to) const {
    rows_to_sample(grad_x_rows_.data() + sample * x_rows_size_, x_pitch_, inputs_.data(),
                   static_cast<Int>(inputs_.size()), in_channels_, to);
  }

 private:
  // Some rows of tiles, whose inputs, and gradients of inputs, begin at `in`.
  void go_through_strip(Int in, const float* grad, const Block& block, Int row, Int rows, Scratch& scratch) {
    const Int tiles = rows * tiling_.across, ins = block.ins, width = block.width;
    const Int in_pitch = point_pitch(tiles * tile_pitch(ins)), grad_pitch = point_pitch(tiles * tile_pitch(width));
    scratch.inputs.resize(kPoints * in_pitch);
    scratch.grads.resize(kPoints * grad_pitch);
    tiling_.for_tiles(row, rows, [&](Int tile, Int down, Int across) {
      transform<InputToPoints>(tiling_.input_of<const float>(x_rows_.data() + in, x_pitch_, down, across),
                               points(scratch.inputs.data() + tile * tile_pitch(ins), in_pitch), ins);
      transform<OutputGradientToPoints>(tiling_.output_of(grad, grad_pitch_, down, across),
                                        points(scratch.grads.data() + tile * tile_pitch(width), grad_pitch), width);
    });
    find_kernel_gradient(block, tiles, row > 0, scratch);
    if (!call_.wants_input) return;
    find_input_gradient(block, tiles, scratch);
    tiling_.for_tiles(row, rows, [&](Int tile, Int down, Int across) {
      transform<PointsToInputGradient>(
          points<const float>(scratch.grad_inputs.data() + tile * tile_pitch(ins), in_pitch),
          tiling_.input_of(grad_x_rows_.data() + in, x_pitch_, down, across), ins, true);
    });
  }

  // From a tile to the next. Products go through a panel of all tiles, which must not fall on few places of a cache.
  static Int tile_pitch(Int channels) { return channels > kWide ? channels + kLine : channels; }

  // At every point: grads' [channels][tiles] x inputs [tiles][in channels], as a block of kernels lies.
  void find_kernel_gradient(const Block& block, Int tiles, bool add, Scratch& scratch) const {
    std::vector<Int> lines(tiles);
    for (Int tile = 0; tile < tiles; ++tile) lines[tile] = tile * tile_pitch(block.ins);
    for (Int point = 0; point < kPoints; ++point) {
      const float* inputs = scratch.inputs.data() + point * point_pitch(tiles * tile_pitch(block.ins));
      const float* grads = scratch.grads.data() + point * point_pitch(tiles * tile_pitch(block.width));
      float* to = scratch.grad_kernels.data() + point * point_pitch(block.width * block.ins);
      for_panels(block.ins, [&](Int c, Int columns) {
        const AcrossRows product{tiles, inputs + c, lines.data(), tile_pitch(block.width)};
        for_row_tiles(block.width, [&](Int o, Int tall) {
          const auto targets = starts(tall, [&](Int r) { return to + c * block.width + (o + r) * columns; });
          multiply_tile(product, tall, columns, grads + o, targets, add);
        });
      });
    }
  }

  // At every point: grads [tiles][channels] x kernels [channels][in channels].
  void find_input_gradient(const Block& block, Int tiles, Scratch& scratch) const {
    const Int in_pitch = point_pitch(tiles * tile_pitch(block.ins));
    scratch.grad_inputs.resize(kPoints * in_pitch);
    for (Int point = 0; point < kPoints; ++point)
      for_panels(block.ins, [&](Int c, Int columns) {
        const float* kernels = scratch.kernels.data() + point * point_pitch(block.width * block.ins);
        const AlongRows product{block.width, kernels + c * block.width, columns};
        multiply_panel(product, scratch.grads.data() + point * point_pitch(tiles * tile_pitch(block.width)),
                       tile_pitch(block.width), tiles, columns, scratch.grad_inputs.data() + point * in_pitch + c,
                       tile_pitch(block.ins));
      });
  }

  const Backward& call_;
  const Tiling tiling_;
  const Int in_channels_, out_, x_pitch_, grad_pitch_, x_rows_size_, grad_rows_size_;
  const std::vector<Int> inputs_, outputs_;  // the rows of their places
  Int strip_ = 0;                            // rows of tiles at a time
  Numbers x_rows_, grad_rows_, grad_x_rows_;
};

// grad [batch, out, height, width] and x [batch, in, height, width], both contiguous.
inline std::tuple<Tensor, Tensor, Tensor> backward_winograd(const Tensor& grad, const Tensor& x,
                                                            const Tensor& attention, const Tensor& cells,
                                                            at::IntArrayRef padding, bool wants_input,
                                                            const std::optional<Tensor>& total) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  const Tiling tiling = check_square(layer, x, padding, false);
  check_images(grad, "grad", layer.batch, layer.out_channels(), tiling.height * tiling.width);
  if (total) check(*total, "total", cells.sizes());
  Backward call{.layer = layer, .wants_input = wants_input, .cells = cells.const_data_ptr<float>()};
  WinogradImages images(call, tiling, x.size(1));
  return backward(call, images, grad, x, attention, cells, total);
}

}  // namespace kernelwarehouse
