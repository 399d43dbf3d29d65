// Forward: a block of output channels is mixed for some samples and multiplied at once.
#pragma once

#include <optional>

#include "basis.h"
#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

// Samples and channels of one task. `together` pairs are mixed at a time for `width` output channels of a cell: enough
// rows for the mixing to be efficient, few enough for the kernels to stay in cache.
struct Blocking {
  Int width, blocks, together;
  Int pitch;  // from the kernels of one segment to the next

  Blocking(const Layer& layer, Int wanted_width, Int pairs) {
    width = block_width(layer.cell_out, wanted_width, kGrain, pairs);
    blocks = (layer.cell_out + width - 1) / width;
    pitch = width * layer.cell_in + kWide;  // no power of two, as for rows
    // Where the cells of a block are packed in one piece, runs of samples share it and may be short.
    const Int room = width * layer.cell_in <= packed_columns(layer.n) ? third_level() / 4 : kBlock;
    together = std::min(pairs, std::max<Int>(1, room / (layer.segments * pitch)));
  }
};

// Calls multiply(pair, first channel of the block, channels, the pair's kernels, their pitch, scratch) for every pair
// in [0, pairs) and block, in parallel. A segment's kernels are [channels][cell_in].
template <class Mixer, class Multiply>
void for_mixed_blocks(const Layer& layer, Int pairs, Int wanted_width, const Mixer& mixer, const Multiply& multiply) {
  const Blocking blocking(layer, wanted_width, pairs);
  const Runs runs(pairs, blocking.blocks);
  const ThereAndBack order(blocking.blocks);
  at::parallel_for(0, blocking.blocks * runs.runs, 1, [&](Int begin, Int end) {
    Packed packed;
    Numbers scratch;
    Numbers kernels(blocking.together * layer.segments * blocking.pitch);
    for (Int task = begin; task < end; ++task) {
      const Int first = order(task / runs.runs) * blocking.width;
      const Int channels = std::min(blocking.width, layer.cell_out - first), columns = channels * layer.cell_in;
      const Int pair_end = std::min(pairs, (task % runs.runs + 1) * runs.run);
      for (Int pair = task % runs.runs * runs.run; pair < pair_end; pair += blocking.together) {
        const Int count = std::min(blocking.together, pair_end - pair);
        mixer(pair, count, first * layer.cell_in, columns, kernels.data(), blocking.pitch, packed);
        for (Int i = 0; i < count; ++i)
          multiply(pair + i, first, channels, kernels.data() + i * layer.segments * blocking.pitch, blocking.pitch,
                   scratch);
      }
    }
  });
}

// Input channels that are mixed at a time for blocks of `width` output channels: those whose packed cells stay near.
template <class Mixer>
inline Int mixed_together(const Mixer& mixer, Int width) {
  const Layer& layer = mixer.layer;
  Int ins = layer.cell_in;
  const Int most = second_level() / 2 / (layer.n * width);
  while (mixer.packs() && ins % (2 * kGrain) == 0 && ins > 2 * kGrain && ins > most && !far(layer)) ins /= 2;
  return ins;
}

// How a product with kernels of several taps is cut up. Blocks of output channels are tasks; in each, the kernels of
// some pairs are mixed for a chunk of the input channels at a time, so that packed cells and kernels stay in the
// second-level cache.
struct Chunks {
  Int width, blocks, ins, together, pitch;

  template <class Mixer>
  Chunks(const Mixer& mixer, Int pairs) {
    const Layer& layer = mixer.layer;
    width = std::min(layer.cell_out, kWide);
    blocks = (layer.cell_out + width - 1) / width;
    ins = mixed_together(mixer, width);
    pitch = width * ins + kWide;  // no power of two, as for rows
    together =
        std::min(pairs, std::max<Int>(1, std::max(mixer.room(), far(layer) ? kBlock : 0) / (layer.segments * pitch)));
  }
};

// A chunk of input channels of a block of `width` output channels over all positions: the kernel is
// [segments][ins][width] with a gap after each segment; sums [positions][width] are begun or added to. Of what is to
// come nearer meanwhile, every segment of every tile takes a piece.
inline void multiply_rows(const Layer& layer, const float* rows, Int pitch, const Int* places, Int positions,
                          const Int* steps, const float* kernel, Int ins, Int width, Int gap, bool begin, float* sums,
                          const std::vector<const char*>& ahead) {
  std::size_t fetched = 0;
  for_panels(width, [&](Int column, Int columns) {
    AlongRows product{ins, kernel + column, width, gap, layer.segments, steps};
    for_row_tiles(positions, [&](Int first, Int tall) {
      product.ahead = fetched < ahead.size() ? ahead.data() + fetched : nullptr;
      fetched += layer.segments;
      const auto a = starts(tall, [&](Int r) { return rows + places[first + r] * pitch; });
      const auto targets = starts(tall, [&](Int r) { return sums + (first + r) * width + column; });
      multiply_tile(product, tall, columns, a, targets, !begin);
    });
  });
}

// Any kernel: x [batch, in, places], or [batch, places, in] with channels_last, and the output likewise.
// targets: the padded row of every place; places: the row that every output position starts from; shifts: of every tap.
template <class Mixer>
Tensor multiply_taps(const Mixer& whole, const Tensor& x, const Tensor& targets, Int padded_places,
                     const Tensor& places, const Tensor& shifts, bool channels_last) {
  const Layer& layer = whole.layer;
  check_tables(layer, targets, padded_places, places, shifts);
  const Int channels = layer.segments / shifts.numel() * layer.cell_in, positions = places.numel();
  check_images(x, "x", layer.batch, channels, targets.numel(), channels_last);
  const Int out = layer.out_channels();
  const Int pitch = row_pitch(channels), sample_rows = padded_places * pitch;
  const auto steps = segment_steps(shifts, pitch, layer);
  Tensor y = channels_last ? at::empty({layer.batch, positions, out}, x.options())
                           : at::empty({layer.batch, out, positions}, x.options());
  const float* x_data = x.const_data_ptr<float>();
  const Int* place = places.const_data_ptr<Int>();
  float* y_data = y.mutable_data_ptr<float>();

  // Few samples at a time, so that their rows stay in cache; but more where the cells do not, and are read for each
  // part.
  const bool small = layer.n * layer.cell() <= third_level();
  const Int part =
      std::min(layer.batch, std::max<Int>(1, (small ? third_level() / 2 : 2 * third_level()) / sample_rows));
  Numbers rows(part * sample_rows, 0.0f);
  for (Int start = 0; start < layer.batch; start += part) {
    const Int samples = std::min(part, layer.batch - start), pairs = samples * layer.out_groups;
    at::parallel_for(0, samples, 1, [&](Int begin, Int end) {
      Numbers turned;
      for (Int b = begin; b < end; ++b)
        sample_to_rows(x_data + (start + b) * x.stride(0), channels_last, channels, targets.const_data_ptr<Int>(),
                       targets.numel(), rows.data() + b * sample_rows, pitch, turned);
    });
    const Mixer mixer = whole.from_sample(start);
    const Chunks chunks(mixer, pairs);
    const Runs runs(pairs, chunks.blocks);
    const ThereAndBack order(chunks.blocks);
    // Sums wait for further chunks; where there are none, for each pair in turn.
    const Int waiting = chunks.ins < layer.cell_in ? runs.run : 1, sums_size = positions * chunks.width;
    at::parallel_for(0, chunks.blocks * runs.runs, 1, [&](Int begin, Int end) {
      Packed packed;
      std::vector<const char*> ahead;
      Numbers kernels(chunks.together * layer.segments * chunks.pitch), sums(waiting * sums_size);
      for (Int task = begin; task < end; ++task) {
        const Int first = order(task / runs.runs) * chunks.width,
                  width = std::min(chunks.width, layer.cell_out - first);
        const Int pair_begin = task % runs.runs * runs.run, pair_end = std::min(pairs, pair_begin + runs.run);
        for (Int in = 0; in < layer.cell_in; in += chunks.ins)
          for (Int pair = pair_begin; pair < pair_end; pair += chunks.together) {
            const Int count = std::min(chunks.together, pair_end - pair);
            mixer(pair, count, Block{first, width, in, chunks.ins}, kernels.data(), chunks.pitch, packed);
            ahead.clear();
            // Of a single kernel, little is computed and much read: the next block comes nearer meanwhile, where the
            // processor does not foresee it.
            if (ways().very_few != Way::along && pairs == 1 && task + 1 < end && in + chunks.ins >= layer.cell_in) {
              const Int next = order(task + 1) * chunks.width;
              mixer.fetch(next, std::min(chunks.width, layer.cell_out - next), chunks.ins * kLineBytes, ahead);
              ahead.resize(round_up(ahead.size(), layer.segments), nullptr);
            }
            for (Int i = pair; i < pair + count; ++i) {
              float* own = sums.data() + (waiting > 1 ? i - pair_begin : 0) * sums_size;
              multiply_rows(layer, rows.data() + i / layer.out_groups * sample_rows + in, pitch, place, positions,
                            steps.data(), kernels.data() + (i - pair) * layer.segments * chunks.pitch, chunks.ins,
                            width, chunks.pitch - width * chunks.ins, in == 0, own, ahead);
              if (in + chunks.ins < layer.cell_in) continue;
              const Int sample = start + i / layer.out_groups, channel = i % layer.out_groups * layer.cell_out + first;
              if (channels_last)
                for (Int p = 0; p < positions; ++p)
                  std::memcpy(y_data + (sample * positions + p) * out + channel, own + p * width,
                              width * sizeof(float));
              else
                transpose(own, width, positions, width, y_data + (sample * out + channel) * positions, positions);
            }
          }
      }
    });
  }
  return y;
}

// Positions of one sample [channels][positions] as panels: for every kWide (fewer at the end) positions,
// [channels][kWide]. The last panel is filled up with zeros.
inline void pack_positions(const float* x, Int channels, Int positions, float* panels) {
  for_panels(round_up(positions, kGrain), [&](Int position, Int width) {
    const Int valid = std::min(width, positions - position);
    float* to = panels + position * channels;
    for (Int c = 0; c < channels; ++c, to += width) {
      const float* from = x + c * positions + position;
      if (valid == width)
        for (Int i = 0; i < width; i += kGrain) store(to + i, load<kGrain>(from + i));
      else
        std::fill_n(std::copy_n(from, valid, to), width - valid, 0.0f);
    }
  });
}

// The input at some positions [channels][count], which the product reads from where it is; the last ones are copied,
// and filled up with zeros, where they end within a panel.
struct Panels {
  const float* x;
  Int positions, channels;
  Numbers last;
  const float* copied = nullptr;  // where the last ones are from

  template <class Body>
  void operator()(Int first, Int count, const Body& body) {
    for_panels(round_up(count, kGrain), [&](Int column, Int columns) {
      const Int position = first + column, valid = std::min(columns, positions - position);
      const float* from = x + position;
      if (valid == columns) return body(position, columns, valid, from, positions);
      if (copied != from) {
        last.resize(channels * columns);
        for (Int c = 0; c < channels; ++c)
          std::fill_n(std::copy_n(from + c * positions, valid, last.data() + c * columns), columns - valid, 0.0f);
        copied = from;
      }
      body(position, columns, valid, last.data(), columns);
    });
  }
};

// Whether kernels of one position are small, beside their images as well.
inline bool small_beside_image(const Layer& layer, Int positions) {
  const Int kernel = layer.out_channels() * layer.segments * layer.cell_in;
  return kernel <= 8 * positions && kernel <= second_level() / 4 && layer.batch * kernel <= 2 * kBlock;
}

// The product with such kernels: they are mixed whole, and as much of the input as stays nearest is multiplied by all
// of a sample's.
template <class Mixer>
void multiply_small(const Mixer& mixer, const float* x, Int positions, float* y) {
  const Layer& layer = mixer.layer;
  const Int channels = layer.segments * layer.cell_in, out = layer.out_channels(), mixture = layer.cell();
  Numbers kernels(layer.batch * out * channels);
  at::parallel_for(0, layer.batch, 1, [&](Int begin, Int end) {
    Packed packed;
    mixer(begin * layer.out_groups, (end - begin) * layer.out_groups, 0, mixture,
          kernels.data() + begin * out * channels, mixture, packed);
  });
  std::vector<Int> steps;
  for (Int group = 0; group < layer.segments; ++group) steps.push_back(group * mixture);
  const Int run = std::clamp<Int>(first_level() / 2 / channels / kWide, 1, 16) * kWide;
  const Int runs = (positions + run - 1) / run;
  at::parallel_for(0, layer.batch * runs, 1, [&](Int begin, Int end) {
    Panels panels{x, positions, channels};
    float beyond[kTall * kWide];
    for (Int task = begin; task < end; ++task) {
      const Int sample = task / runs, first = task % runs * run, count = std::min(run, positions - first);
      const float* own = kernels.data() + sample * out * channels;
      panels.x = x + sample * channels * positions;
      for_row_tiles(out, [&](Int o, Int tall) {
        const auto a = starts(tall, [&](Int r) {
          return own + (o + r) / layer.cell_out * layer.segments * mixture + (o + r) % layer.cell_out * layer.cell_in;
        });
        panels(first, count, [&](Int position, Int columns, Int valid, const float* panel, Int pitch) {
          const AlongRows product{layer.cell_in, panel, pitch, 0, layer.segments, steps.data()};
          const auto target = [&](Int r) { return y + (sample * out + o + r) * positions + position; };
          if (valid == columns) return multiply_tile(product, tall, columns, a, starts(tall, target), false);
          multiply_tile(product, tall, columns, a, starts(tall, [&](Int r) { return beyond + r * columns; }), false);
          for (Int r = 0; r < tall; ++r) std::copy_n(beyond + r * columns, valid, target(r));
        });
      });
    }
  });
}

// A kernel of one position: x [batch, in, *space] -> [batch, out, *space], with positions along the vectors, so that
// neither kernels nor activations are turned around.
template <class Mixer>
Tensor multiply_pointwise(const Mixer& mixer, const Tensor& x) {
  const Layer& layer = mixer.layer;
  const Int channels = layer.segments * layer.cell_in;
  const Int positions = x.numel() / std::max<Int>(1, layer.batch * channels);
  check_images(x, "x", layer.batch, channels, positions);
  const Int out = layer.out_channels(), sample_panels = channels * round_up(positions, kGrain);
  std::vector<Int> sizes = x.sizes().vec();
  sizes[1] = out;
  Tensor y = at::empty(sizes, x.options());
  const float* x_data = x.const_data_ptr<float>();
  float* y_data = y.mutable_data_ptr<float>();
  if (small_beside_image(layer, positions)) {
    multiply_small(mixer, x_data, positions, y_data);
    return y;
  }
  // Inputs are packed once for all blocks of channels, as far as an allocator keeps so much memory; large ones sample
  // by sample, again for each block.
  const bool at_once = layer.batch * sample_panels <= 3 * kBlock;
  Numbers panels(at_once ? layer.batch * sample_panels : 0);
  if (at_once)
    at::parallel_for(0, layer.batch, 1, [&](Int begin, Int end) {
      for (Int b = begin; b < end; ++b)
        pack_positions(x_data + b * channels * positions, channels, positions, panels.data() + b * sample_panels);
    });
  for_mixed_blocks(
      layer, layer.pairs(), 9 * kTall, mixer,
      [&](Int pair, Int first, Int width, const float* kernels, Int kernel_pitch, Numbers& own_panels) {
        const Int sample = pair / layer.out_groups, channel = pair % layer.out_groups * layer.cell_out + first;
        std::vector<Int> steps;
        for (Int group = 0; group < layer.segments; ++group) steps.push_back(group * kernel_pitch);
        const float* sample_data = panels.data() + sample * sample_panels;
        if (!at_once) {
          own_panels.resize(sample_panels);
          pack_positions(x_data + sample * channels * positions, channels, positions, own_panels.data());
          sample_data = own_panels.data();
        }
        for_panels(round_up(positions, kGrain), [&](Int position, Int columns) {
          const AlongRows product{layer.cell_in, sample_data + position * channels, columns, 0, layer.segments,
                                  steps.data()};
          const Int valid = std::min(columns, positions - position);
          float beyond[kTall * kWide];  // a panel that goes on after the last position comes here first
          for_row_tiles(width, [&](Int o, Int tall) {
            const auto a = starts(tall, [&](Int r) { return kernels + (o + r) * layer.cell_in; });
            const auto target = [&](Int r) { return y_data + (sample * out + channel + o + r) * positions + position; };
            if (valid == columns) return multiply_tile(product, tall, columns, a, starts(tall, target), false);
            multiply_tile(product, tall, columns, a, starts(tall, [&](Int r) { return beyond + r * columns; }), false);
            for (Int r = 0; r < tall; ++r) std::copy_n(beyond + r * columns, valid, target(r));
          });
        });
      });
  return y;
}

inline Tensor forward_taps(const Tensor& x, const Tensor& attention, const Tensor& cells, const Tensor& targets,
                           Int padded_places, const Tensor& places, const Tensor& shifts, bool channels_last) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  const CellMixer mixer{layer, attention.const_data_ptr<float>(), cells.const_data_ptr<float>()};
  return multiply_taps(mixer, x, targets, padded_places, places, shifts, channels_last);
}

inline Tensor forward_pointwise(const Tensor& x, const Tensor& attention, const Tensor& cells) {
  check_mixing(attention, cells);
  const Layer layer = layer_of_cells(attention, cells);
  return multiply_pointwise(CellMixer{layer, attention.const_data_ptr<float>(), cells.const_data_ptr<float>()}, x);
}

// Calls multiply(mixer) with a mixer for bases of any kind: numbers as they are, or in 16 bits where there are steps,
// or in 24 where there are `low` ones as well.
template <class Multiply>
inline Tensor with_basis(const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                         const std::optional<Tensor>& low, const std::optional<Tensor>& steps,
                         const Multiply& multiply) {
  check_basis(hidden, scale, basis, low, steps);
  const Layer layer = layer_of_basis(hidden, basis);
  const float *units = hidden.const_data_ptr<float>(), *factors = scale.const_data_ptr<float>();
  const auto with = [&](auto source) {
    const float* own_steps = steps ? steps->const_data_ptr<float>() : nullptr;
    return multiply(BasisMixer<decltype(source)>{layer, units, factors, source, own_steps, in_panels(basis)});
  };
  if (low) return with(Split{basis.const_data_ptr<int16_t>(), low->const_data_ptr<uint8_t>()});
  return steps ? with(basis.const_data_ptr<int16_t>()) : with(basis.const_data_ptr<float>());
}

inline Tensor forward_taps_basis(const Tensor& x, const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                                 const std::optional<Tensor>& low, const std::optional<Tensor>& steps,
                                 const Tensor& targets, Int padded_places, const Tensor& places, const Tensor& shifts,
                                 bool channels_last) {
  return with_basis(hidden, scale, basis, low, steps, [&](const auto& mixer) {
    return multiply_taps(mixer, x, targets, padded_places, places, shifts, channels_last);
  });
}

inline Tensor forward_pointwise_basis(const Tensor& x, const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                                      const std::optional<Tensor>& low, const std::optional<Tensor>& steps) {
  TORCH_CHECK_VALUE(!in_panels(basis), "basis of sizes ", basis.sizes(), " is in panels, for kernels of several taps");
  return with_basis(hidden, scale, basis, low, steps, [&](const auto& mixer) { return multiply_pointwise(mixer, x); });
}

}  // namespace kernelwarehouse
