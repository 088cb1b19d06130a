// Arguments of the Python functions: views of CPU arrays, checked with messages that name the argument.
#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include <nanobind/nanobind.h>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

enum class Dtype : uint8_t { kFloat32, kBf16, kInt32, kInt64, kUint8, kOther };

inline constexpr int64_t kAny = -1;  // in an expected shape: any length

// A torch tensor or numpy array for the length of one call. Does not own the memory: a caller's reference keeps a
// tensor alive, a buffer is held until the view goes.
class Array {
 public:
  static constexpr int kMaxDims = 8;

  Array(nanobind::handle object, const char* name);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // Raises ValueError unless the dtype is one of these.
  const Array& of(std::initializer_list<Dtype> dtypes) const;
  // Raises ValueError unless the shape is this (kAny matches all); `letters` is how messages write it, as "[T, K]".
  const Array& shaped(std::initializer_list<int64_t> shape, const char* letters) const;
  // Raises ValueError unless the elements of the last `dims` dimensions lie one after another.
  const Array& contiguous_last(int dims) const;
  const Array& contiguous() const { return contiguous_last(ndim_); }
  const Array& writable() const;

  int ndim() const { return ndim_; }
  int64_t size(int dim) const { return shape_[dim]; }
  // Elements between neighbours of dimension `dim`.
  int64_t stride(int dim) const { return strides_[dim]; }
  Dtype dtype() const { return dtype_; }
  int64_t item_bytes() const { return item_bytes_; }
  int64_t elements() const;
  const char* name() const { return name_; }

  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  // [first, one past the last) byte that elements occupy.
  struct Extent {
    const char* begin;
    const char* end;
    bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
  };
  Extent extent() const;

  [[noreturn]] void fail(const std::string& message) const;

 private:
  bool view_dlpack(nanobind::handle object);
  void view_buffer(nanobind::handle object);
  std::string describe() const;

  const char* name_;
  void* data_ = nullptr;
  Dtype dtype_ = Dtype::kOther;
  int64_t item_bytes_ = 0;
  int ndim_ = 0;
  bool read_only_ = false;
  int64_t shape_[kMaxDims] = {};
  int64_t strides_[kMaxDims] = {};
  Py_buffer buffer_ = {};
};

std::string shape_text(const int64_t* shape, int ndim);

}  // namespace twinplane::kernels
