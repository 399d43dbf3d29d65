// Forward of 3x3 kernels by Winograd's transform: as in forward.h, a block of output channels is mixed for some samples
// and multiplied at once.
#pragma once

#include <optional>

#include "forward.h"
#include "winograd.h"

namespace kernelwarehouse {

// How the work is cut up. Blocks of output channels are tasks; in each, the kernels of some pairs are mixed, and then
// transformed and multiplied one by one, for some input channels and rows of tiles at a time.
struct WinogradBlocks {
  Int width, blocks;   // output channels of a cell
  Int mixed_ins, ins;  // input channels that are mixed, and multiplied, at a time
  Int together;        // pairs
  Int pitch;           // from the mixtures of one segment to the next
  Int strip;           // rows of tiles
  bool whole;          // whether the sums of a pair's tiles wait for further input channels

  template <class Mixer>
  WinogradBlocks(const Mixer& mixer, const Tiling& tiling, Int pairs) {
    const Layer& layer = mixer.layer;
    // Every run of pairs packs the cells again, and every block transforms the tiles again.
    const Int room = 2 * kBlock / (layer.segments * layer.cell_in * std::min<Int>(pairs, 16));
    width = std::min(layer.cell_out, std::clamp<Int>(room / kWide * kWide, kWide, 4 * kWide));
    const Int threads = at::get_num_threads(), count = (layer.cell_out + width - 1) / width;
    if (!Runs::about_even(Runs(pairs, count).share, threads, pairs * count))
      width = std::min(width, block_width(layer.cell_out, width, kWide, pairs));
    const auto narrow = [&](const auto& too_wide) {
      while (too_wide() && width > kWide) width = round_up(width / 2, kWide);
    };
    // Transformed kernels should stay in the second-level cache. Sums of all tiles that wait for further input channels
    // would not, and are not to take much memory either.
    const Int most = second_level() / 2 / kPoints;
    ins = layer.cell_in;
    while (width * ins > most && ins > 4 * kWide && ins % (2 * kGrain) == 0) ins /= 2;
    whole = ins < layer.cell_in || layer.segments > 9;
    narrow([&] { return width * ins > most || (whole && kPoints * tiling.down * tiling.across * width > kBlock); });
    blocks = (layer.cell_out + width - 1) / width;
    mixed_ins = mixed_together(mixer, std::min(width, kWide));
    pitch = width * layer.cell_in + kWide;
    together = std::min(pairs, std::max<Int>(1, 2 * kBlock / (layer.segments * pitch)));
    strip = tiling.rows_together(kPoints * std::max(ins, width));
  }
};

// The outputs of one pair for a block of output channels.
class WinogradProduct {
 public:
  WinogradProduct(const Layer& layer, const Tiling& tiling, const WinogradBlocks& blocks)
      : layer_(layer),
        tiling_(tiling),
        blocks_(blocks),
        kernels_(kPoints * point_pitch(blocks.ins * blocks.width)),
        inputs_(kPoints * point_pitch(blocks.strip * tiling.across * blocks.ins)),
        sums_((blocks.whole ? (tiling.down + blocks.strip - 1) / blocks.strip : 1) * sums_size()),
        outputs_(2 * blocks.strip * tiling.output_pitch() * blocks.width) {}

  // x: rows of the padded grid; mixed: [segment][panel of output channels][input channel][channel of the panel].
  // done(first line, lines, [line][place][output channel]) is called for every strip of the output, whose lines have
  // tiling.output_pitch() places.
  template <class Done>
  void multiply(const float* x, Int x_pitch, const float* mixed, Int width, const Done& done) {
    const Int groups = layer_.segments / 9;
    for (Int group = 0; group < groups; ++group)
      for (Int in = 0; in < layer_.cell_in; in += blocks_.ins) {
        const Int ins = blocks_.ins;  // of which a cell has some times as many
        const bool first = group == 0 && in == 0, last = group == groups - 1 && in + ins == layer_.cell_in;
        for_panels(width, [&](Int column, Int columns) {
          const float* from = mixed + group * blocks_.pitch + column * layer_.cell_in + in * columns;
          transform<KernelToPoints>({from, 3 * groups * blocks_.pitch, groups * blocks_.pitch},
                                    points(kernels_.data() + column * ins, point_pitch(ins * width)), ins * columns);
        });
        for (Int row = 0; row < tiling_.down; row += blocks_.strip) {
          const Int rows = std::min(blocks_.strip, tiling_.down - row);
          multiply_strip(x + group * layer_.cell_in + in, x_pitch, ins, width, row, rows, !first);
          if (last) finish_strip(row, rows, width, done);
        }
      }
  }

 private:
  // Of a strip.
  Int sums_size() const { return kPoints * point_pitch(blocks_.strip * tiling_.across * blocks_.width); }
  float* sums(Int row) { return sums_.data() + (blocks_.whole ? row / blocks_.strip * sums_size() : 0); }

  void multiply_strip(const float* x, Int x_pitch, Int ins, Int width, Int row, Int rows, bool add) {
    const Int tiles = rows * tiling_.across;
    tiling_.for_tiles(row, rows, [&](Int tile, Int down, Int across) {
      transform<InputToPoints>(tiling_.input_of(x, x_pitch, down, across),
                               points(inputs_.data() + tile * ins, point_pitch(tiles * ins)), ins);
    });
    for (Int point = 0; point < kPoints; ++point)
      for_panels(width, [&](Int column, Int columns) {
        const AlongRows product{ins, kernels_.data() + point * point_pitch(ins * width) + column * ins, columns};
        multiply_panel(product, inputs_.data() + point * point_pitch(tiles * ins), ins, tiles, columns,
                       sums(row) + point * point_pitch(tiles * width) + column, width, add);
      });
  }

  template <class Done>
  void finish_strip(Int row, Int rows, Int width, const Done& done) {
    const Int tiles = rows * tiling_.across;
    tiling_.for_tiles(0, rows, [&](Int tile, Int down, Int across) {
      transform<PointsToOutput>(points<const float>(sums(row) + tile * width, point_pitch(tiles * width)),
                                tiling_.output_of(outputs_.data(), width, down, across), width);
    });
    done(2 * row, std::min(2 * rows, tiling_.height - 2 * row), outputs_.data());
  }

  const Layer& layer_;
  const Tiling& tiling_;
  const WinogradBlocks& blocks_;
  Numbers kernels_, inputs_, sums_, outputs_;
};

// A block of output channels, [line][place][output channel] with places beyond the image, to where it belongs.
inline void write_lines(const Tiling& tiling, const float* from, Int lines, Int width, bool channels_last, float* to,
                        Int out) {
  for (Int line = 0; line < lines; ++line, from += tiling.output_pitch() * width) {
    const Int place = line * tiling.width;
    if (channels_last)
      for (Int x = 0; x < tiling.width; ++x)
        std::memcpy(to + (place + x) * out, from + x * width, width * sizeof(float));
    else
      transpose(from, width, tiling.width, width, to + place, tiling.height * tiling.width);
  }
}

// x [batch, in, height, width], or [batch, height, width, in] with channels_last, and the output likewise.
template <class Mixer>
Tensor multiply_winograd(const Mixer& all, const Tensor& x, at::IntArrayRef padding, bool channels_last) {
  const Layer& layer = all.layer;
  const Tiling tiling = check_square(layer, x, padding, channels_last);
  const Int in = x.size(channels_last ? 3 : 1), out = layer.out_channels(), positions = tiling.height * tiling.width;
  const std::vector<Int> targets = tiling.input_rows();
  const Int x_pitch = row_pitch(in), sample_rows = tiling.input_places() * x_pitch;
  Tensor y = channels_last ? at::empty({layer.batch, tiling.height, tiling.width, out}, x.options())
                           : at::empty({layer.batch, out, tiling.height, tiling.width}, x.options());
  const float* x_data = x.const_data_ptr<float>();
  float* y_data = y.mutable_data_ptr<float>();

  // Cells are read and packed for every part of the batch, and inputs are gone through in strips, one after the other.
  const Int part = std::min(layer.batch, std::max<Int>(1, 4 * third_level() / sample_rows));
  Numbers rows(part * sample_rows, 0.0f);
  for (Int start = 0; start < layer.batch; start += part) {
    const Int samples = std::min(part, layer.batch - start), pairs = samples * layer.out_groups;
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      Numbers turned;
      for (Int b = begin; b < end; ++b)
        sample_to_rows(x_data + (start + b) * x.stride(0), channels_last, in, targets.data(),
                       static_cast<Int>(targets.size()), rows.data() + b * sample_rows, x_pitch, turned);
    });
    const Mixer mixer = all.from_sample(start);
    const WinogradBlocks blocks(mixer, tiling, pairs);
    const Runs runs(pairs, blocks.blocks);
    const ThereAndBack order(blocks.blocks);
    at::parallel_for(0, blocks.blocks * runs.runs, 1, [&](Int begin, Int end) {
      Packed packed;
      Numbers mixed(blocks.together * layer.segments * blocks.pitch);
      WinogradProduct product(layer, tiling, blocks);
      for (Int task = begin; task < end; ++task) {
        const Int first = order(task / runs.runs) * blocks.width,
                  count = std::min(blocks.width, layer.cell_out - first);
        const Int pair_begin = task % runs.runs * runs.run, pair_end = std::min(pairs, pair_begin + runs.run);
        for (Int pair = pair_begin; pair < pair_end; pair += blocks.together) {
          const Int some = std::min(blocks.together, pair_end - pair);
          for_panels(count, [&](Int column, Int columns) {
            for (Int c = 0; c < layer.cell_in; c += blocks.mixed_ins)
              mixer(pair, some, Block{first + column, columns, c, blocks.mixed_ins},
                    mixed.data() + column * layer.cell_in + c * columns, blocks.pitch, packed);
          });
          for (Int i = pair; i < pair + some; ++i) {
            const Int sample = i / layer.out_groups, channel = i % layer.out_groups * layer.cell_out + first;
            float* to = y_data + (start + sample) * out * positions + channel * (channels_last ? 1 : positions);
            product.multiply(
                rows.data() + sample * sample_rows, x_pitch, mixed.data() + (i - pair) * layer.segments * blocks.pitch,
                count, [&](Int line, Int lines, const float* from) {
                  const Int place = line * tiling.width;
                  write_lines(tiling, from, lines, count, channels_last, to + place * (channels_last ? out : 1), out);
                });
          }
        }
      }
    });
  }
  return y;
}

inline Tensor forward_winograd(const Tensor& x, const Tensor& attention, const Tensor& cells, at::IntArrayRef padding,
                               bool channels_last) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  const CellMixer mixer{layer, attention.const_data_ptr<float>(), cells.const_data_ptr<float>()};
  return multiply_winograd(mixer, x, padding, channels_last);
}

inline Tensor forward_winograd_basis(const Tensor& x, const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                                     const std::optional<Tensor>& low, const std::optional<Tensor>& steps,
                                     at::IntArrayRef padding, bool channels_last) {
  return with_basis(hidden, scale, basis, low, steps,
                    [&](const auto& mixer) { return multiply_winograd(mixer, x, padding, channels_last); });
}

}  // namespace kernelwarehouse
