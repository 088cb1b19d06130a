#include "kernels/cpu/arrays.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

// The C interface of DLPack 1.2 (https://dmlc.github.io/dlpack): torch.Tensor.__dlpack_c_exchange_api__ is a capsule of
// a table whose `describe` fills a DLTensor without allocating anything, in some 30 ns. Only what is used is declared;
// the layouts are those of dlpack.h.
struct DlDevice {
  int32_t type;  // 1: CPU
  int32_t id;
};
struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};
struct DlExchangeApi {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  DlExchangeApi* older;
  void* allocate;
  void* export_owned;
  void* import;
  int (*describe)(void* object, DlTensor* out);  // 0 on success, -1 with a Python exception; may be null
  void* current_stream;
};

constexpr int32_t kDlCpu = 1;
constexpr uint32_t kDlMajor = 1;

Dtype dtype_of(DlDataType type) {
  constexpr uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4;
  if (type.lanes != 1) return Dtype::kOther;
  if (type.code == kFloat && type.bits == 32) return Dtype::kFloat32;
  if (type.bits == 16 && (type.code == kBfloat || type.code == kUint)) return Dtype::kBf16;
  if (type.code == kInt && type.bits == 32) return Dtype::kInt32;
  if (type.code == kUint && type.bits == 32) return Dtype::kInt32;
  if (type.code == kInt && type.bits == 64) return Dtype::kInt64;
  if (type.code == kUint && type.bits == 8) return Dtype::kUint8;
  return Dtype::kOther;
}

Dtype dtype_of(const Py_buffer& buffer) {
  const std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
  if (format == "f") return Dtype::kFloat32;
  if (format == "H") return Dtype::kBf16;
  if (format == "B") return Dtype::kUint8;
  if (format == "i" || format == "I") return Dtype::kInt32;
  if ((format == "l" || format == "q") && buffer.itemsize == 8) return Dtype::kInt64;
  return Dtype::kOther;
}

const char* text_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kBf16:
      return "bfloat16 (or its bits as uint16)";
    case Dtype::kInt32:
      return "int32";
    case Dtype::kInt64:
      return "int64";
    case Dtype::kUint8:
      return "uint8";
    case Dtype::kOther:
      return "another dtype";
  }
  return "";
}

// The exchange table of an object's type, or null. The last type seen is remembered: nearly every call passes
// torch.Tensor. Called with the GIL held.
const DlExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const DlExchangeApi* known_api = nullptr;
  if (type == known_type) return known_api;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->version.major != kDlMajor) api = api->older;
  if (api == nullptr || api->describe == nullptr) return nullptr;
  Py_INCREF(type);  // for good: so that no other type ever has its address
  known_type = type;
  known_api = api;
  return api;
}

}  // namespace

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += (i == 0 ? "" : ", ") + (shape[i] == kAny ? "any" : std::to_string(shape[i]));
  return text + "]";
}

Array::Array(nb::handle object, const char* name) : name_(name) {
  if (!view_dlpack(object)) view_buffer(object);
}

Array::~Array() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool Array::view_dlpack(nb::handle object) {
  const DlExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
  if (api == nullptr) return false;
  DlTensor tensor;
  if (api->describe(object.ptr(), &tensor) != 0) throw nb::python_error();
  if (tensor.device.type != kDlCpu) fail("must be in CPU memory");
  if (tensor.ndim > kMaxDims) fail("has more than " + std::to_string(kMaxDims) + " dimensions");
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  dtype_ = dtype_of(tensor.dtype);
  item_bytes_ = tensor.dtype.bits / 8 * tensor.dtype.lanes;
  ndim_ = tensor.ndim;
  for (int i = 0; i < ndim_; ++i) shape_[i] = tensor.shape[i];
  int64_t below = 1;
  for (int i = ndim_ - 1; i >= 0; --i) {
    strides_[i] = tensor.strides == nullptr ? below : tensor.strides[i];
    below *= shape_[i];
  }
  return true;
}

void Array::view_buffer(nb::handle object) {
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    buffer_.obj = nullptr;
    fail(std::string("must be a CPU torch tensor or a numpy array, not ") + Py_TYPE(object.ptr())->tp_name);
  }
  data_ = buffer_.buf;
  dtype_ = dtype_of(buffer_);
  item_bytes_ = buffer_.itemsize;
  ndim_ = buffer_.ndim;
  read_only_ = buffer_.readonly != 0;
  if (ndim_ > kMaxDims) fail("has more than " + std::to_string(kMaxDims) + " dimensions");
  for (int i = 0; i < ndim_; ++i) {
    shape_[i] = buffer_.shape[i];
    if (buffer_.strides[i] % item_bytes_ != 0) fail("has a stride that is not a multiple of its item size");
    strides_[i] = buffer_.strides[i] / item_bytes_;
  }
}

std::string Array::describe() const { return std::string(text_of(dtype_)) + " " + shape_text(shape_, ndim_); }

void Array::fail(const std::string& message) const {
  const std::string text = std::string(name_) + (message.starts_with('[') ? "" : " ") + message;  // "ids[3] is"
  throw nb::value_error(text.c_str());
}

const Array& Array::of(std::initializer_list<Dtype> dtypes) const {
  if (std::find(dtypes.begin(), dtypes.end(), dtype_) != dtypes.end()) return *this;
  std::string wanted;
  for (const Dtype dtype : dtypes) wanted += std::string(wanted.empty() ? "" : " or ") + text_of(dtype);
  fail("must be " + wanted + ", got " + describe());
}

const Array& Array::shaped(std::initializer_list<int64_t> shape, const char* letters) const {
  bool same = static_cast<int>(shape.size()) == ndim_;
  int i = 0;
  for (const int64_t wanted : shape) {
    if (!same) break;
    same = wanted == kAny || wanted == shape_[i];
    ++i;
  }
  if (same) return *this;
  fail(std::string("must be ") + letters + " = " + shape_text(shape.begin(), static_cast<int>(shape.size())) +
       ", got " + shape_text(shape_, ndim_));
}

const Array& Array::contiguous_last(int dims) const {
  int64_t below = 1;
  for (int i = ndim_ - 1; i >= ndim_ - dims; --i) {
    if (shape_[i] > 1 && strides_[i] != below) {
      fail("must be contiguous in its last " + std::to_string(dims) + " dimension(s), got strides " +
           shape_text(strides_, ndim_) + " of shape " + shape_text(shape_, ndim_));
    }
    below *= shape_[i];
  }
  return *this;
}

const Array& Array::writable() const {
  if (read_only_) fail("is read-only but would be written");
  return *this;
}

int64_t Array::elements() const {
  int64_t product = 1;
  for (int i = 0; i < ndim_; ++i) product *= shape_[i];
  return product;
}

Array::Extent Array::extent() const {
  const char* begin = static_cast<const char*>(data_);
  if (elements() == 0) return {begin, begin};
  int64_t low = 0;
  int64_t high = 0;
  for (int i = 0; i < ndim_; ++i) (strides_[i] < 0 ? low : high) += (shape_[i] - 1) * strides_[i];
  return {begin + low * item_bytes_, begin + (high + 1) * item_bytes_};
}

}  // namespace twinplane::kernels
