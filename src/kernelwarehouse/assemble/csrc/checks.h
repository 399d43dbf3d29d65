// What operators demand of their arguments. Anybody can call them, through torch.ops, and what they are told decides
// which memory is read and written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "basis.h"
#include "layer.h"

namespace kernelwarehouse {

constexpr Int kAny = -1;             // of sizes: at least 1, as loops divide by them
constexpr Int kMost = Int{1} << 31;  // of rows and places, so that no size of what is made of them overflows

// Numbers of one type, one after the other. Sizes of 1 may follow the wanted ones: cells have them for kernel
// positions.
inline void check(const Tensor& given, const char* name, at::IntArrayRef wanted, at::ScalarType type = at::kFloat) {
  const auto sizes = given.sizes();
  bool fits = sizes.size() >= wanted.size();
  for (std::size_t axis = 0; fits && axis < sizes.size(); ++axis)
    fits = axis >= wanted.size()  ? sizes[axis] == 1
           : wanted[axis] == kAny ? sizes[axis] > 0
                                  : sizes[axis] == wanted[axis];
  TORCH_CHECK_VALUE(fits && given.is_contiguous() && given.scalar_type() == type, name, " is ", given.scalar_type(),
                    " of sizes ", sizes, " and strides ", given.strides(), "; ", type, " of sizes ", wanted,
                    " is wanted, contiguous (-1: any but 0)");
}

inline void check_channels(const char* name, Int channels) {
  TORCH_CHECK_VALUE(channels % kGrain == 0, name, " are ", channels, " channels wide; multiples of ", kGrain,
                    " are wanted");
}

// attention [batch, out_groups, segments, n], cells [n, cell_out, cell_in].
inline void check_mixing(const Tensor& attention, const Tensor& cells) {
  check(cells, "cells", {kAny, kAny, kAny});
  check(attention, "attention", {kAny, kAny, kAny, cells.size(0)});
  for (const Int axis : {1, 2}) check_channels("cells", cells.size(axis));
}

// hidden [batch, n], scale [batch, out_groups, segments], basis [out_groups, segments, n, cell_out, cell_in] or in
// panels, as numbers or, with steps [out_groups, segments, n], as multiples of these; `low` has eight bits more of
// each.
inline void check_basis(const Tensor& hidden, const Tensor& scale, const Tensor& basis,
                        const std::optional<Tensor>& low, const std::optional<Tensor>& steps) {
  const auto type = steps ? at::kShort : at::kFloat;
  if (in_panels(basis))
    check(basis, "basis", {kAny, kAny, kAny, kAny, kAny, kWide}, type);
  else
    check(basis, "basis", {kAny, kAny, kAny, kAny, kAny}, type);
  check(hidden, "hidden", {kAny, kAny});
  const Layer layer = layer_of_basis(hidden, basis);
  check(hidden, "hidden", {kAny, layer.n});
  check(scale, "scale", {layer.batch, layer.out_groups, layer.segments});
  if (steps) check(*steps, "steps", {layer.out_groups, layer.segments, layer.n});
  if (low) {
    TORCH_CHECK_VALUE(steps && !in_panels(basis), "low is given ", steps ? "for a basis in panels" : "without steps");
    check(*low, "low", basis.sizes(), at::kByte);
  }
  for (const Int channels : {layer.cell_out, layer.cell_in}) check_channels("bases", channels);
}

// images [batch, channels, *space], or [batch, places, channels] with channels_last.
inline void check_images(const Tensor& images, const char* name, Int batch, Int channels, Int places,
                         bool channels_last = false) {
  const auto sizes = images.sizes();
  const bool fits = sizes.size() >= 3 && places > 0 && sizes[0] == batch &&
                    sizes[channels_last ? sizes.size() - 1 : 1] == channels &&
                    images.numel() == batch * channels * places;
  TORCH_CHECK_VALUE(fits && images.is_contiguous() && images.scalar_type() == at::kFloat, name, " is ",
                    images.scalar_type(), " of sizes ", sizes, " and strides ", images.strides(), "; ", at::kFloat,
                    ", contiguous, ", batch, " of ", channels, " channels and ", places, " places is wanted");
}

inline void check_rows(const Tensor& rows, const char* name, Int end) {
  check(rows, name, {kAny}, at::kLong);
  const Int* first = rows.const_data_ptr<Int>();
  const bool inside = std::all_of(first, first + rows.numel(), [&](Int row) { return row >= 0 && row < end; });
  TORCH_CHECK_VALUE(inside, name, " are not rows from 0 to ", end - 1);
}

// The tables of ops.cpp: no output position may look beyond the padded rows.
inline void check_tables(const Layer& layer, const Tensor& targets, Int padded_places, const Tensor& places,
                         const Tensor& shifts) {
  TORCH_CHECK_VALUE(padded_places > 0 && padded_places < kMost, "padded_places are ", padded_places);
  check_rows(shifts, "shifts", padded_places);
  const Int *shift = shifts.const_data_ptr<Int>(), taps = shifts.numel(), farthest = shift[taps - 1];
  TORCH_CHECK_VALUE(*std::max_element(shift, shift + taps) == farthest, "shifts end with ", farthest,
                    ", which is not the largest");
  TORCH_CHECK_VALUE(layer.segments % taps == 0, "attention has ", layer.segments, " segments for ", taps, " taps");
  check_rows(targets, "targets", padded_places);
  check_rows(places, "places", padded_places - farthest);
}

}  // namespace kernelwarehouse
