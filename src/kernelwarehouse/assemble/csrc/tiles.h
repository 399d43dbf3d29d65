// Small matrix products in registers, and the packing that feeds them.
//
// Plain GCC/Clang vector types, compiled for whatever instructions the machine has; no intrinsics but in `widen`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace kernelwarehouse {

using Int = int64_t;

// The one place that knows the machine: numbers in a vector, and rows of a full tile, whose sums (two vectors for every
// row), two loads and a broadcast fill the registers. KERNELWAREHOUSE_LANES overrules what the instruction set says:
// compilers split vectors that are wider than the machine's, so that either width can be tested anywhere.
#ifndef KERNELWAREHOUSE_LANES
#ifdef __AVX512F__
#define KERNELWAREHOUSE_LANES 16
#else
#define KERNELWAREHOUSE_LANES 8
#endif
#endif
constexpr Int kLanes = KERNELWAREHOUSE_LANES;
static_assert(kLanes == 8 || kLanes == 16, "KERNELWAREHOUSE_LANES is 8 or 16");
// 32 registers of 512 bits, where a row more would need more pointers than there are; or 16 of 256 bits, or 32 of 128
// bits in pairs.
constexpr Int kTall = kLanes == 16 ? 11 : 6;
constexpr Int kWide = 2 * kLanes;  // columns of a full tile
constexpr Int kLine = 16;          // numbers of a cache line
constexpr Int kLineBytes = kLine * sizeof(float);
constexpr Int kSteps = 8;  // of a sum between two looks at what to fetch
constexpr Int kGrain = 8;  // channels of cells are multiples of this; a vector of it ends what is none of kLanes

template <int L>
struct VectorOf {
  typedef float Numbers __attribute__((vector_size(L * sizeof(float)), aligned(4), may_alias));
  typedef float Register __attribute__((vector_size(L * sizeof(float))));  // for arrays that functions are handed
  typedef int16_t Shorts __attribute__((vector_size(L * sizeof(int16_t)), aligned(2), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(L * sizeof(uint8_t)), aligned(1), may_alias));
  typedef int32_t Whole __attribute__((vector_size(L * sizeof(int32_t))));
};
template <int L>
using Vector = typename VectorOf<L>::Numbers;
using Lanes = Vector<kLanes>;

// GCC before 12 knows no shuffles but those whose results are as long as what they are made of.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#define KERNELWAREHOUSE_OLD_GCC
#endif

// Numbers of two vectors, by their places in both, one after the other.
template <int... place, class V>
inline V shuffle(V a, V b) {
#ifdef KERNELWAREHOUSE_OLD_GCC
  return __builtin_shuffle(a, b, typename VectorOf<sizeof...(place)>::Whole{place...});
#else
  return __builtin_shufflevector(a, b, place...);
#endif
}

template <int L = kLanes>
inline Vector<L> load(const float* from) {
  return *reinterpret_cast<const Vector<L>*>(from);
}

// Numbers of 16 bits, or of 24 whose last eight lie apart, as ones of 32. Some processors have instructions for it,
// which GCC 12 does not find by itself: it takes vectors apart, bytes one by one.
template <int L>
inline typename VectorOf<L>::Whole widen(const int16_t* from) {
#ifdef __AVX512F__
  if constexpr (L == 16)
    return (typename VectorOf<L>::Whole)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)from));
#endif
#ifdef __AVX2__
  if constexpr (L == 8)
    return (typename VectorOf<L>::Whole)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
  return __builtin_convertvector(*reinterpret_cast<const typename VectorOf<L>::Shorts*>(from),
                                 typename VectorOf<L>::Whole);
}
template <int L>
inline typename VectorOf<L>::Whole widen(const int16_t* high, const uint8_t* low) {
#ifdef __AVX512F__
  if constexpr (L == 16)
    return widen<L>(high) * 256 +
           (typename VectorOf<L>::Whole)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)low));
#endif
#ifdef __AVX2__
  if constexpr (L == 8)
    return widen<L>(high) * 256 +
           (typename VectorOf<L>::Whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)low));
#endif
#ifdef KERNELWAREHOUSE_OLD_GCC
  typename VectorOf<L>::Whole end;
  for (int lane = 0; lane < L; ++lane) end[lane] = low[lane];
  return widen<L>(high) * 256 + end;
#else
  // Side by side: a zero, the last eight bits and the 16 before them (of little-endian numbers).
  using Bytes = VectorOf<8>::Bytes;
  using Shorts = VectorOf<8>::Shorts;
  typename VectorOf<L>::Whole whole;
  for (int first = 0; first < L; first += 8) {
    const auto eight = *reinterpret_cast<const Bytes*>(low + first);
    const auto end = (Shorts)__builtin_shufflevector(eight, Bytes{}, 8, 0, 8, 1, 8, 2, 8, 3, 8, 4, 8, 5, 8, 6, 8, 7);
    const auto begin = *reinterpret_cast<const Shorts*>(high + first);
    const Shorts joined[2] = {__builtin_shufflevector(end, begin, 0, 8, 1, 9, 2, 10, 3, 11),
                              __builtin_shufflevector(end, begin, 4, 12, 5, 13, 6, 14, 7, 15)};
    std::memcpy(reinterpret_cast<int32_t*>(&whole) + first, joined, sizeof joined);
  }
  return whole >> 8;
#endif
}

template <int L = kLanes>
inline Vector<L> load(const int16_t* from) {
  return __builtin_convertvector(widen<L>(from), Vector<L>);
}

// Whole numbers of 24 bits, the last eight of which lie apart from the others; used as if it were a pointer to them.
struct Split {
  const int16_t* high;
  const uint8_t* low;

  Split operator+(Int count) const { return {high + count, low + count}; }
  float operator[](Int i) const { return static_cast<float>(high[i] * 256 + low[i]); }
};
template <int L = kLanes>
inline Vector<L> load(Split from) {
  return __builtin_convertvector(widen<L>(from.high, from.low), Vector<L>);
}

// Numbers from `from` on come nearer.
template <class Number>
inline void fetch(const Number* from, Int count) {
  for (Int i = 0; i < count; i += kLineBytes / static_cast<Int>(sizeof(Number))) __builtin_prefetch(from + i, 0, 2);
}
inline void fetch(Split from, Int count) {
  fetch(from.high, count);
  fetch(from.low, count);
}

template <class V>
inline void store(float* to, V value) {
  *reinterpret_cast<Vector<sizeof(V) / sizeof(float)>*>(to) = value;
}
// The first numbers of a vector; the others are 0.
template <int L = kLanes>
inline Vector<L> load_some(const float* from, Int count) {
  if (count >= L) return load<L>(from);
  Vector<L> value = {};
  for (Int lane = 0; lane < count; ++lane) value[lane] = from[lane];
  return value;
}
template <class V>
inline void store_some(float* to, V value, Int count) {
  if (count >= static_cast<Int>(sizeof(V) / sizeof(float)))
    store(to, value);
  else
    for (Int lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

// The sum of a vector's numbers, in a few steps that wait for little: halves are added to each other.
inline float total(Vector<8> v) {
  v += shuffle<4, 5, 6, 7, 0, 1, 2, 3>(v, v);
  v += shuffle<2, 3, 0, 1, 6, 7, 4, 5>(v, v);
  return v[0] + v[1];
}
inline float total(Vector<16> v) {
#ifdef KERNELWAREHOUSE_OLD_GCC
  Vector<8> halves[2];
  std::memcpy(halves, &v, sizeof halves);
  return total(halves[0] + halves[1]);
#else
  return total(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
}

inline Int round_up(Int value, Int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Loops over a tile must be unrolled whole, for its sums to stay in registers; GCC gives up on large ones.
#ifdef __clang__
#define KERNELWAREHOUSE_UNROLL _Pragma("unroll")
#else
#define KERNELWAREHOUSE_UNROLL _Pragma("GCC unroll 16")
#endif

// Where each row of a tile starts.
using Sources = std::array<const float*, kTall>;
using Targets = std::array<float*, kTall>;

template <class Place>
inline auto starts(Int rows, const Place& place) {
  std::array<decltype(place(0)), kTall> found;
  for (Int r = 0; r < rows; ++r) found[r] = place(r);
  return found;
}

// A tile is the product of R rows of A and a panel of B, V vectors of L columns. Its rows are stored at to[r], or added
// to what is there. There is one function for every shape of a tile, shared by all products: they are most of what is
// compiled.
template <int R, int V, int L>
struct Tile {
  Vector<L> sums[R][V];

  Tile() {
    KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] =
        Vector<L>{};
  }

  // What results are added to.
  explicit Tile(const Targets& from) {
    KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] =
        load<L>(from[r] + v * L);
  }

  // number(r) is one of A's column, row where one of B's begins.
  template <class Number, class Source>
  void multiply(const Number& number, Source row) {
    Vector<L> columns[V];
    KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) columns[v] = load<L>(row + v * L);
    KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] +=
        number(r) * columns[v];
  }

  // What sums are added to comes nearer while they grow.
  static void prefetch(const Targets& to) {
    KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) for (int c = 0; c < V * L; c += kLine)
        __builtin_prefetch(to[r] + c, 1);
  }

  // At to[r] + place.
  void write(const Targets& to, bool add, Int place = 0) const {
    if (add)
      KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v)
          store(to[r] + place + v * L, load<L>(to[r] + place + v * L) + sums[r][v]);
    else
      KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) KERNELWAREHOUSE_UNROLL for (int v = 0; v < V; ++v)
          store(to[r] + place + v * L, sums[r][v]);
  }
};

// A's rows lie contiguous, from a[r] + steps[segment] on for each of the segments that the sum runs over; B's rows are
// `pitch` apart, with a gap after each segment. The same rows of A can be multiplied by several B, one after the other,
// for results that are `to_step` apart: sums of a few numbers take less time than to find out where all of it is.
struct AlongRows {
  Int depth;
  const float* b;
  Int pitch;
  Int gap = 0;
  Int segments = 1;
  const Int* steps = &kNoStep;
  Int repeats = 1;
  Int to_step = 0;
  const char* const* ahead = nullptr;  // for each segment, what to fetch meanwhile, a line for every step; or nothing
  static constexpr Int kNoStep = 0;

  template <int R, int V, int L>
  __attribute__((noinline)) void multiply(const Sources& a, const Targets& to, bool add) const {
    const float* row = b;
    for (Int repeat = 0; repeat < repeats; ++repeat) {
      Tile<R, V, L> tile;
      for (Int segment = 0; segment < segments; ++segment, row += gap) {
        const float* rows[R];
        KERNELWAREHOUSE_UNROLL for (int r = 0; r < R; ++r) rows[r] = a[r] + steps[segment];
        const char* line = ahead ? ahead[segment] : nullptr;
        const Int together = line ? kSteps : depth;
        for (Int k = 0; k < depth;) {
          const Int end = std::min(depth, k + together);
          if (line)
            for (Int step = k; step < end; ++step) __builtin_prefetch(line + step * kLineBytes, 0, 2);
          for (; k < end; ++k, row += pitch) tile.multiply([&](int r) { return rows[r][k]; }, row);
        }
      }
      tile.write(to, add, repeat * to_step);
    }
  }
};

// A's columns lie one after the other, as pack_columns leaves them, or `apart` from each other; row k of B is at
// b + places[k].
struct AcrossRows {
  Int depth;
  const float* b;
  const Int* places;
  Int apart = 0;

  template <int R, int V, int L>
  __attribute__((noinline)) void multiply(const float* a, const Targets& to, bool add) const {
    Tile<R, V, L> tile;
    if (add) tile.prefetch(to);
    const Int step = apart ? apart : R;
    for (Int k = 0; k < depth; ++k, a += step) tile.multiply([&](int r) { return a[r]; }, b + places[k]);
    tile.write(to, add);
  }
};

// body(number), for a number from 1 to Most, as one that is known when compiling.
template <int Most, class Body>
inline void with_constant(Int number, const Body& body) {
  if constexpr (Most > 1) {
    if (number < Most) return with_constant<Most - 1>(number, body);
  }
  body(std::integral_constant<int, Most>());
}

// One tile: rows as for_row_tiles gives them, columns as for_panels does.
template <class Product, class A>
inline void multiply_tile(const Product& product, Int rows, Int columns, const A& a, const Targets& to, bool add) {
  const auto multiply = [&](auto tall) {
    if (columns == kWide)
      product.template multiply<tall, 2, kLanes>(a, to, add);
    else if (columns == kLanes)
      product.template multiply<tall, 1, kLanes>(a, to, add);
    else
      product.template multiply<tall, 1, kGrain>(a, to, add);
  };
  with_constant<kTall>(rows, multiply);
}

// Calls body(first row, rows) for tiles that cover `rows`, as few as can be and as even: the panel has to come near for
// a tile of few rows as for a full one.
template <class Body>
inline void for_row_tiles(Int rows, const Body& body) {
  Int first = 0;
  for (Int tiles = (rows + kTall - 1) / kTall; tiles > 0; --tiles) {
    const Int tall = (rows - first + tiles - 1) / tiles;
    body(first, tall);
    first += tall;
  }
}

// Calls body(first column, columns) for panels that cover `columns`, a multiple of kGrain.
template <class Body>
inline void for_panels(Int columns, const Body& body) {
  Int first = 0;
  for (; first + kWide <= columns; first += kWide) body(first, kWide);
  for (const Int width : {kLanes, kGrain})
    for (; first + width <= columns; first += width) body(first, width);
}

// Calls body(first number, lanes) for vectors that cover `numbers`; the last one may go beyond, and is no wider than it
// has to be.
template <class Body>
inline void for_vectors(Int numbers, const Body& body) {
  Int first = 0;
  for (; numbers - first > kGrain; first += kLanes) body(first, std::integral_constant<int, kLanes>());
  if (first < numbers) body(first, std::integral_constant<int, kGrain>());
}

// to[c][r] = from[r][c] for eight rows.
template <class Source>
inline void transpose_eight(Source from, Int from_pitch, Int columns, float* to, Int to_pitch) {
  Int c = 0;
  for (; c + 8 <= columns; c += 8) {
    Vector<8> t[8], u[8];
    for (int r = 0; r < 8; ++r) t[r] = load<8>(from + r * from_pitch + c);
    for (int r = 0; r < 8; r += 2) {
      u[r] = shuffle<0, 8, 2, 10, 4, 12, 6, 14>(t[r], t[r + 1]);
      u[r + 1] = shuffle<1, 9, 3, 11, 5, 13, 7, 15>(t[r], t[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
      for (int i = r; i < r + 2; ++i) {
        t[i] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(u[i], u[i + 2]);
        t[i + 2] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(u[i], u[i + 2]);
      }
    for (int r = 0; r < 4; ++r) {
      u[r] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(t[r], t[r + 4]);
      u[r + 4] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(t[r], t[r + 4]);
    }
    for (int r = 0; r < 8; ++r) store(to + (c + r) * to_pitch, u[r]);
  }
  for (; c < columns; ++c)
    for (int r = 0; r < 8; ++r) to[c * to_pitch + r] = from[r * from_pitch + c];
}

// to[c][r] = from[r][c] for any number of rows. Some columns at a time, so that what they become is written while it is
// near.
template <class Source>
inline void transpose(Source from, Int from_pitch, Int rows, Int columns, float* to, Int to_pitch) {
  constexpr Int together = 64;
  for (; columns > 0; columns -= together, from = from + together, to += together * to_pitch) {
    const Int count = std::min(together, columns);
    Int r = 0;
    for (; r + 8 <= rows; r += 8) transpose_eight(from + r * from_pitch, from_pitch, count, to + r, to_pitch);
    for (; r < rows; ++r)
      for (Int c = 0; c < count; ++c) to[c * to_pitch + r] = from[r * from_pitch + c];
  }
}

// Columns [0, columns) of `depth` rows -> panels [panel][depth][its columns], which tiles read from front to end. Rows
// are far away from each other, and reading along them is what memory is good at; eight at a time, as many as a cache
// holds whose places all coincide, make for longer writes.
template <class Source>
inline void pack_panels(Source from, Int pitch, Int depth, Int columns, float* packed) {
  constexpr Int together = 8;
  for (Int k = 0; k < depth; k += together)
    for_panels(columns, [&](Int column, Int width) {
      const Int end = std::min(depth, k + together);
      float* to = packed + column * depth + k * width;
      for (Int row = k; row < end; ++row, to += width)
        for (Int c = 0; c < width; c += kGrain) store(to + c, load<kGrain>(from + row * pitch + column + c));
    });
}

// A's columns [0, columns) of the rows at from + places[k] -> the tiles of for_row_tiles, [tile][row][its columns], for
// AcrossRows.
inline void pack_columns(const float* from, const Int* places, Int depth, Int columns, float* packed) {
  for_row_tiles(columns, [&](Int first, Int tall) {
    float* to = packed + first * depth;
    for (Int k = 0; k < depth; ++k, to += tall) std::memcpy(to, from + places[k] + first, tall * sizeof(float));
  });
}

// All tiles of rows of A that are `a_pitch` apart, whose sums are `to_pitch` apart, and one panel of columns.
inline void multiply_panel(const AlongRows& product, const float* a, Int a_pitch, Int rows, Int columns, float* to,
                           Int to_pitch, bool add = false) {
  for_row_tiles(rows, [&](Int first, Int tall) {
    const auto lines = starts(tall, [&](Int r) { return a + (first + r) * a_pitch; });
    const auto targets = starts(tall, [&](Int r) { return to + (first + r) * to_pitch; });
    multiply_tile(product, tall, columns, lines, targets, add);
  });
}

// to[row][column] = sum over k of a[row][k] * packed[panel][k][column].
inline void multiply_packed(const float* a, Int a_pitch, Int rows, Int depth, const float* packed, Int columns,
                            float* to, Int to_pitch) {
  for_panels(columns, [&](Int column, Int width) {
    const AlongRows product{depth, packed + column * depth, width};
    multiply_panel(product, a, a_pitch, rows, width, to + column, to_pitch);
  });
}

}  // namespace kernelwarehouse
