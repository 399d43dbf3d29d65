// What caches hold, and memory for numbers.
#pragma once

#include <unistd.h>

#include <new>
#include <vector>

#include "tiles.h"

namespace kernelwarehouse {

// Numbers that caches hold: what the machine says of one core's, or what is usual where it does not say.
inline Int cache_numbers(int name, Int usual_bytes) {
  const Int bytes = name < 0 ? 0 : static_cast<Int>(sysconf(name));
  return (bytes > 0 ? bytes : usual_bytes) / static_cast<Int>(sizeof(float));
}
#ifdef _SC_LEVEL2_CACHE_SIZE
constexpr int kLevel1 = _SC_LEVEL1_DCACHE_SIZE, kLevel2 = _SC_LEVEL2_CACHE_SIZE;
#else
constexpr int kLevel1 = -1, kLevel2 = -1;
#endif
inline Int first_level() {
  static const Int numbers = cache_numbers(kLevel1, 32 * 1024);
  return numbers;
}
inline Int second_level() {
  static const Int numbers = cache_numbers(kLevel2, 512 * 1024);
  return numbers;
}
// What stays in a share of the third level; what it says of itself may be the whole of a machine that others use as
// well.
inline Int third_level() { return 6 * second_level(); }

// The kernels that exist at a time, for each thread. A compromise: mixing wants many samples at a time, so that packing
// the cells pays, but an allocator maps blocks of more than 32 MB anew on every call.
constexpr Int kBlock = 2 * 1024 * 1024;

// Vectors of numbers that start a line of the cache, so that no load crosses one, and that are not set to 0 unasked.
template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t line{64};

  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), line)); }
  void deallocate(T* numbers, std::size_t) { ::operator delete(numbers, line); }
  template <class U>
  void construct(U* number) {
    ::new (static_cast<void*>(number)) U;
  }
  template <class U, class V>
  void construct(U* number, const V& value) {
    ::new (static_cast<void*>(number)) U(value);
  }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
using Numbers = std::vector<float, Aligned<float>>;

}  // namespace kernelwarehouse
