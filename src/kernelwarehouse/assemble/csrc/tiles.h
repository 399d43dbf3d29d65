// Small matrix products in registers, and the packing that feeds them.
//
// Plain GCC/Clang vector types, no intrinsics: compiled for whatever instructions the machine has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kernelwarehouse {

using Int = int64_t;

constexpr Int kLanes = 8;
constexpr Int kWide = 2 * kLanes;  // columns of a full tile
constexpr Int kTall = 6;           // rows of a full tile: 12 sums, 2 loads and a broadcast fill 16 registers

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Lanes*>(to) = value; }
inline void add(float* to, Lanes value) { store(to, load(to) + value); }

inline Int round_up(Int value, Int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Both tiles compute sums[r][v] = sum over k of A(r, k) * B(k, v), for R rows and V vectors of columns, and hand every
// vector to finish(r, v, sum).

// A(r, k) lies contiguous in k. The sum runs over segments; the rows a[r] are read from a[r] + step[segment], while b
// goes on from where the last segment ended, after a gap.
template <int R, int V, class Finish>
inline void tile_along_rows(const float* const* a, const Int* step, Int segments, Int depth, const float* b, Int pitch,
                            const Finish& finish, Int gap = 0) {
  Lanes sums[R][V] = {};
  for (Int segment = 0; segment < segments; ++segment, b += gap) {
    const float* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = a[r] + step[segment];
    for (Int k = 0; k < depth; ++k, b += pitch) {
      Lanes column[V];
      for (int v = 0; v < V; ++v) column[v] = load(b + v * kLanes);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] += rows[r][k] * column[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) finish(r, v, sums[r][v]);
}

// A(r, k) lies contiguous in r, from a(k) on; row k of B is at b(k).
template <int R, int V, class PlaceA, class PlaceB, class Finish>
inline void tile_across_rows(const PlaceA& a, Int depth, const PlaceB& b, const Finish& finish) {
  Lanes sums[R][V] = {};
  for (Int k = 0; k < depth; ++k) {
    const float *column_of_a = a(k), *row = b(k);
    Lanes column[V];
    for (int v = 0; v < V; ++v) column[v] = load(row + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] += column_of_a[r] * column[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) finish(r, v, sums[r][v]);
}

// Calls body(first row, constant number of rows) for tiles that cover `rows`, as even as can be at the end.
template <class Body>
inline void for_row_tiles(Int rows, const Body& body) {
  for (Int first = 0; first < rows;) {
    const Int left = rows - first;
    const Int tall = left >= 2 * kTall || left == kTall ? kTall : left > kTall ? (left + 1) / 2 : left;
    switch (tall) {
      case 6: body(first, std::integral_constant<int, 6>()); break;
      case 5: body(first, std::integral_constant<int, 5>()); break;
      case 4: body(first, std::integral_constant<int, 4>()); break;
      case 3: body(first, std::integral_constant<int, 3>()); break;
      case 2: body(first, std::integral_constant<int, 2>()); break;
      default: body(first, std::integral_constant<int, 1>());
    }
    first += tall;
  }
}

// Calls body(first column, constant number of vectors) for panels that cover `columns`, a multiple of kLanes.
template <class Body>
inline void for_panels(Int columns, const Body& body) {
  Int first = 0;
  for (; first + kWide <= columns; first += kWide) body(first, std::integral_constant<int, 2>());
  if (first < columns) body(first, std::integral_constant<int, 1>());
}

// to[c][r] = from[r][c] for eight rows.
inline void transpose_eight(const float* from, Int from_pitch, Int columns, float* to, Int to_pitch) {
  Int c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Lanes t[8], u[8];
    for (int r = 0; r < 8; ++r) t[r] = load(from + r * from_pitch + c);
    for (int r = 0; r < 8; r += 2) {
      u[r] = __builtin_shufflevector(t[r], t[r + 1], 0, 8, 2, 10, 4, 12, 6, 14);
      u[r + 1] = __builtin_shufflevector(t[r], t[r + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int r = 0; r < 8; r += 4)
      for (int i = r; i < r + 2; ++i) {
        t[i] = __builtin_shufflevector(u[i], u[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        t[i + 2] = __builtin_shufflevector(u[i], u[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
    for (int r = 0; r < 4; ++r) {
      u[r] = __builtin_shufflevector(t[r], t[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      u[r + 4] = __builtin_shufflevector(t[r], t[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int r = 0; r < 8; ++r) store(to + (c + r) * to_pitch, u[r]);
  }
  for (; c < columns; ++c)
    for (int r = 0; r < 8; ++r) to[c * to_pitch + r] = from[r * from_pitch + c];
}

// to[c][r] = from[r][c] for any number of rows.
inline void transpose(const float* from, Int from_pitch, Int rows, Int columns, float* to, Int to_pitch) {
  Int r = 0;
  for (; r + 8 <= rows; r += 8) transpose_eight(from + r * from_pitch, from_pitch, columns, to + r, to_pitch);
  for (; r < rows; ++r)
    for (Int c = 0; c < columns; ++c) to[c * to_pitch + r] = from[r * from_pitch + c];
}

// Columns [0, columns) of `depth` rows -> panels [panel][depth][16 or 8], which tiles read from front to end. Rows are far
// away from each other, and reading along them is what memory is good at; eight at a time, as many as a cache holds whose
// places all coincide, make for longer writes.
inline void pack_panels(const float* from, Int pitch, Int depth, Int columns, float* packed) {
  constexpr Int together = 8;
  Int k = 0;
  const auto pack = [&](auto rows) {
    for_panels(columns, [&](Int column, auto vectors) {
      float* to = packed + column * depth + k * vectors * kLanes;
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v)
          store(to + (r * vectors + v) * kLanes, load(from + (k + r) * pitch + column + v * kLanes));
    });
    k += rows;
  };
  while (k + together <= depth) pack(std::integral_constant<int, together>());
  while (k < depth) pack(std::integral_constant<int, 1>());
}

// to[row][column] = sum over k of a[row][k] * packed[panel][k][column].
inline void multiply_packed(const float* a, Int a_pitch, Int rows, Int depth, const float* packed, Int columns, float* to,
                            Int to_pitch) {
  const Int no_step = 0;
  for_panels(columns, [&](Int column, auto vectors) {
    for_row_tiles(rows, [&](Int first, auto tall) {
      const float* lines[tall];
      for (int r = 0; r < tall; ++r) lines[r] = a + (first + r) * a_pitch;
      tile_along_rows<tall, vectors>(lines, &no_step, 1, depth, packed + column * depth, vectors * kLanes,
                                     [&](int r, int v, Lanes sum) {
                                       store(to + (first + r) * to_pitch + column + v * kLanes, sum);
                                     });
    });
  });
}

}  // namespace kernelwarehouse
