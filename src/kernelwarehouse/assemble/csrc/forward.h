// Forward: a block of output channels is mixed for some samples and multiplied at once.
#pragma once

#include "layer.h"

namespace kernelwarehouse {

// Samples and channels of one task. `together` pairs are mixed at a time for `width` output channels of a cell: enough
// rows for the mixing to be efficient, few enough for the kernels to stay in cache.
struct Blocking {
  Int width, blocks, together, runs, run;
  Int pitch;  // from the kernels of one segment to the next

  Blocking(const Layer& layer, Int wanted_width, Int pairs) {
    width = std::min(layer.cell_out, wanted_width);
    blocks = (layer.cell_out + width - 1) / width;
    pitch = width * layer.cell_in + kWide;  // no power of two, as for rows
    // Where the cells of a block are packed in one piece, runs of samples share it and may be short.
    const Int room = width * layer.cell_in <= packed_columns(layer.n) ? kFarCache / 4 : kBlock;
    together = std::min(pairs, std::max<Int>(1, room / (layer.segments * pitch)));
    // Pairs are split between tasks only where there are too few blocks for the threads.
    const Int threads = at::get_num_threads();
    runs = threads == 1 ? 1 : std::min(pairs, (4 * threads + blocks - 1) / blocks);
    run = (pairs + runs - 1) / runs;
  }
};

// Calls multiply(pair, first channel of the block, channels, the pair's kernels, their pitch, scratch) for every pair in
// [0, pairs) and block, in parallel. A segment's kernels are [channels][cell_in].
template <class Mixer, class Multiply>
void for_mixed_blocks(const Layer& layer, Int pairs, Int wanted_width, const Mixer& mixer, const Multiply& multiply) {
  const Blocking blocking(layer, wanted_width, pairs);
  at::parallel_for(0, blocking.blocks * blocking.runs, 1, [&](Int begin, Int end) {
    Packed packed;
    std::vector<float> scratch;
    std::vector<float> kernels(blocking.together * layer.segments * blocking.pitch);
    for (Int task = begin; task < end; ++task) {
      const Int first = task / blocking.runs * blocking.width;
      const Int channels = std::min(blocking.width, layer.cell_out - first), columns = channels * layer.cell_in;
      const Int pair_end = std::min(pairs, (task % blocking.runs + 1) * blocking.run);
      for (Int pair = task % blocking.runs * blocking.run; pair < pair_end; pair += blocking.together) {
        const Int count = std::min(blocking.together, pair_end - pair);
        mixer(pair, count, first * layer.cell_in, columns, kernels.data(), blocking.pitch, packed);
        for (Int i = 0; i < count; ++i)
          multiply(pair + i, first, channels, kernels.data() + i * layer.segments * blocking.pitch, blocking.pitch, scratch);
      }
    }
  });
}

// One panel of output channels over all positions: the kernel is [segments][cell_in][V * 8] with a gap after each segment,
// and write receives (first position, positions, sums [positions][V * 8]).
template <int V, class Write>
void multiply_rows(const Layer& layer, const float* rows, Int pitch, const Int* places, Int positions, const Int* steps,
                   const float* kernel, Int gap, const Write& write) {
  for_row_tiles(positions, [&](Int first, auto tall) {
    const float* a[tall];
    for (int r = 0; r < tall; ++r) a[r] = rows + places[first + r] * pitch;
    float sums[tall * V * kLanes];
    tile_along_rows<tall, V>(a, steps, layer.segments, layer.cell_in, kernel, V * kLanes,
                             [&](int r, int v, Lanes sum) { store(sums + (r * V + v) * kLanes, sum); }, gap);
    write(first, static_cast<Int>(tall), sums);
  });
}

// Any kernel: x [batch, in, places], or [batch, places, in] with channels_last, and the output likewise.
// targets: the padded row of every place; places: the row that every output position starts from; shifts: of every tap.
template <class Mixer>
Tensor multiply_taps(const Mixer& mixer, const Tensor& x, const Tensor& targets, Int padded_places, const Tensor& places,
                     const Tensor& shifts, bool channels_last) {
  const Layer& layer = mixer.layer;
  const Int channels = x.size(channels_last ? 2 : 1), positions = places.numel(), out = layer.out_channels();
  const Int pitch = row_pitch(channels), sample_rows = padded_places * pitch;
  const auto steps = segment_steps(shifts, pitch, layer);
  Tensor y = channels_last ? at::empty({layer.batch, positions, out}, x.options())
                           : at::empty({layer.batch, out, positions}, x.options());
  const float* x_data = x.const_data_ptr<float>();
  const Int* place = places.const_data_ptr<Int>();
  float* y_data = y.mutable_data_ptr<float>();

  // Few samples at a time, so that their rows stay in cache; but more where the cells do not, and are read for each chunk.
  const bool small = layer.n * layer.cell() <= kFarCache;
  const Int chunk = std::min(layer.batch, std::max<Int>(1, (small ? kFarCache / 2 : 2 * kFarCache) / sample_rows));
  std::vector<float> rows(chunk * sample_rows);
  for (Int start = 0; start < layer.batch; start += chunk) {
    const Int samples = std::min(chunk, layer.batch - start);
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      std::vector<float> turned;
      for (Int b = begin; b < end; ++b)
        sample_to_rows(x_data + (start + b) * x.stride(0), channels_last, channels, targets.const_data_ptr<Int>(),
                       targets.numel(), rows.data() + b * sample_rows, pitch, turned);
    });
    for_mixed_blocks(
        layer, samples * layer.out_groups, kWide, mixer.from_sample(start),
        [&](Int pair, Int first, Int width, const float* kernels, Int kernel_pitch, std::vector<float>& turned) {
          const Int sample = start + pair / layer.out_groups;
          const Int channel = pair % layer.out_groups * layer.cell_out + first;
          const Int size = layer.cell_in * width, gap = mixer.turned ? kernel_pitch - size : 0;
          if (!mixer.turned) {
            turned.resize(layer.segments * size);
            for (Int segment = 0; segment < layer.segments; ++segment)
              transpose(kernels + segment * kernel_pitch, layer.cell_in, width, layer.cell_in,
                        turned.data() + segment * size, width);
            kernels = turned.data();
          }
          const auto write = [&](Int position, Int tall, const float* sums) {
            if (channels_last) {
              for (Int r = 0; r < tall; ++r)
                std::memcpy(y_data + (sample * positions + position + r) * out + channel, sums + r * width,
                            width * sizeof(float));
            } else {
              float* target = y_data + (sample * out + channel) * positions + position;
              for (Int lane = 0; lane < width; ++lane)
                for (Int r = 0; r < tall; ++r) target[lane * positions + r] = sums[r * width + lane];
            }
          };
          const float* sample_start = rows.data() + pair / layer.out_groups * sample_rows;
          if (width == kWide)
            multiply_rows<2>(layer, sample_start, pitch, place, positions, steps.data(), kernels, gap, write);
          else
            multiply_rows<1>(layer, sample_start, pitch, place, positions, steps.data(), kernels, gap, write);
        });
  }
  return y;
}

// Positions of one sample [channels][positions] as panels: for every 16 (at the end 8) positions, [channels][16]. The last
// panel is filled up with zeros.
inline void pack_positions(const float* x, Int channels, Int positions, float* panels) {
  for_panels(round_up(positions, kLanes), [&](Int position, auto vectors) {
    constexpr Int lanes = vectors * kLanes;
    const Int valid = std::min<Int>(lanes, positions - position);
    float* to = panels + position * channels;
    for (Int c = 0; c < channels; ++c, to += lanes) {
      const float* from = x + c * positions + position;
      if (valid == lanes) {
        for (int v = 0; v < vectors; ++v) store(to + v * kLanes, load(from + v * kLanes));
      } else {
        std::fill_n(std::copy_n(from, valid, to), lanes - valid, 0.0f);
      }
    }
  });
}

// A kernel of one position: x [batch, in, *space] -> [batch, out, *space], with positions along the vectors, so that
// neither kernels nor activations are turned around.
template <class Mixer>
Tensor multiply_pointwise(const Mixer& mixer, const Tensor& x) {
  const Layer& layer = mixer.layer;
  const Int channels = x.size(1), positions = c10::multiply_integers(x.sizes().slice(2));
  const Int out = layer.out_channels(), sample_panels = channels * round_up(positions, kLanes);
  std::vector<Int> sizes = x.sizes().vec();
  sizes[1] = out;
  Tensor y = at::empty(sizes, x.options());
  const float* x_data = x.const_data_ptr<float>();
  float* y_data = y.mutable_data_ptr<float>();
  // Small inputs are packed once for all blocks of channels, large ones again for each, so that they stay in cache.
  const bool at_once = layer.batch * sample_panels <= kBlock;
  std::vector<float> panels(at_once ? layer.batch * sample_panels : 0);
  if (at_once)
    at::parallel_for(0, layer.batch, 1, [&](Int begin, Int end) {
      for (Int b = begin; b < end; ++b)
        pack_positions(x_data + b * channels * positions, channels, positions, panels.data() + b * sample_panels);
    });
  for_mixed_blocks(
      layer, layer.pairs(), 8 * kTall, mixer,
      [&](Int pair, Int first, Int width, const float* kernels, Int kernel_pitch, std::vector<float>& own_panels) {
        const Int sample = pair / layer.out_groups, channel = pair % layer.out_groups * layer.cell_out + first;
        std::vector<Int> steps;
        for (Int group = 0; group < layer.segments; ++group) steps.push_back(group * kernel_pitch);
        const float* sample_data = panels.data() + sample * sample_panels;
        if (!at_once) {
          own_panels.resize(sample_panels);
          pack_positions(x_data + sample * channels * positions, channels, positions, own_panels.data());
          sample_data = own_panels.data();
        }
        for_panels(round_up(positions, kLanes), [&](Int position, auto vectors) {
          const Int valid = std::min<Int>(vectors * kLanes, positions - position);
          for_row_tiles(width, [&](Int o, auto tall) {
            const float* a[tall];
            for (int r = 0; r < tall; ++r) a[r] = kernels + (o + r) * layer.cell_in;
            float* target = y_data + (sample * out + channel + o) * positions + position;
            tile_along_rows<tall, vectors>(a, steps.data(), layer.segments, layer.cell_in, sample_data + position * channels,
                                           vectors * kLanes, [&](int r, int v, Lanes sum) {
                                             float* to = target + r * positions + v * kLanes;
                                             const Int whole = std::min<Int>(kLanes, valid - v * kLanes);
                                             if (whole == kLanes)
                                               store(to, sum);
                                             else
                                               for (Int lane = 0; lane < whole; ++lane) to[lane] = sum[lane];
                                           });
          });
        });
      });
  return y;
}

inline Tensor forward_taps(const Tensor& x, const Tensor& attention, const Tensor& cells, const Tensor& targets,
                           Int padded_places, const Tensor& places, const Tensor& shifts, bool channels_last) {
  const Layer layer = layer_of_cells(attention, cells);
  // Turning the cells around is cheaper than turning every sample's mixtures, unless there are few of those.
  const bool turned = layer.pairs() * layer.segments >= 4 * layer.n && layer.n * layer.cell() <= 2 * kBlock;
  const Tensor source = turned ? turn_cells(layer, cells) : cells;
  const CellMixer mixer{layer, attention.const_data_ptr<float>(), source.const_data_ptr<float>(), turned};
  return multiply_taps(mixer, x, targets, padded_places, places, shifts, channels_last);
}

inline Tensor forward_pointwise(const Tensor& x, const Tensor& attention, const Tensor& cells) {
  const Layer layer = layer_of_cells(attention, cells);
  return multiply_pointwise(CellMixer{layer, attention.const_data_ptr<float>(), cells.const_data_ptr<float>()}, x);
}

inline Tensor forward_taps_basis(const Tensor& x, const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                                 const Tensor& targets, Int padded_places, const Tensor& places, const Tensor& shifts,
                                 bool channels_last) {
  const Layer layer = layer_of_basis(hidden, basis);
  const BasisMixer mixer{layer, hidden.const_data_ptr<float>(), scale.const_data_ptr<float>(), basis.const_data_ptr<float>()};
  return multiply_taps(mixer, x, targets, padded_places, places, shifts, channels_last);
}

inline Tensor forward_pointwise_basis(const Tensor& x, const Tensor& hidden, const Tensor& scale, const Tensor& basis) {
  const Layer layer = layer_of_basis(hidden, basis);
  const BasisMixer mixer{layer, hidden.const_data_ptr<float>(), scale.const_data_ptr<float>(), basis.const_data_ptr<float>()};
  return multiply_pointwise(mixer, x);
}

}  // namespace kernelwarehouse
