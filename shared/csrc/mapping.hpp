// Mapping a session's segment, and its header: who writes it, who checks it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "shared/csrc/points.hpp"
#include "shared/csrc/wire.hpp"
#include "shared/csrc/word.hpp"

namespace twinplane::shm {

// The mapping is not what it should be. The message names what was found and what was expected.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Plane { kControl, kData };

// Pages of a shared file, from its start; unmapped at the end of its life. Movable, not copyable.
// mmap holds a reference to the file of its own: the descriptor may be closed afterwards.
class Mapping {
 public:
  Mapping(int fd, uint64_t bytes) : bytes_(bytes) {
    // Populated: a page fault in the middle of a step would cost more than the step's hand-over.
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the segment");
    base_ = static_cast<std::byte*>(at);
  }
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }

  std::byte* at(uint64_t offset) const { return base_ + offset; }

  template <typename T>
  T& as(uint64_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  // INV-2 by hardware: from here on a write into [offset, offset + bytes) is a segmentation fault.
  void make_read_only(uint64_t offset, uint64_t bytes) const {
    if (mprotect(base_ + offset, wire::align_up(bytes, wire::kPage), PROT_READ) != 0) {
      throw std::system_error(errno, std::generic_category(), "mprotect of the segment");
    }
  }

 private:
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
};

inline uint64_t file_bytes(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat of the segment");
  return static_cast<uint64_t>(status.st_size);
}

// Field 22 of /proc/<pid>/stat, in clock ticks since boot: with the pid it names a process for good, because pids are
// reused. 0 if there is no such process. The command name (field 2) may hold blanks and parentheses.
inline uint64_t process_start_time(uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));  // from field 3 on
  std::string field;
  for (int i = 3; i < 22; ++i) fields >> field;
  uint64_t start_time = 0;
  fields >> start_time;
  return start_time;
}

// Raises ProtocolError for capacities no session can have.
inline void check_capacities(const wire::Capacities& c) {
  const std::pair<const char*, uint32_t> needed[] = {{"ring_depth", c.ring_depth},
                                                     {"max_rows", c.max_rows},
                                                     {"max_step_tokens", c.max_step_tokens},
                                                     {"max_table_writes", c.max_table_writes},
                                                     {"max_results", c.max_results}};
  for (const auto& [name, value] : needed) {
    if (value == 0) throw ProtocolError(std::string("capacity ") + name + " is 0, it must be at least 1");
  }
  constexpr uint32_t kMaxDepth = 1024;  // keeps the segment's size far from overflowing 64 bits
  if (c.ring_depth > kMaxDepth) {
    throw ProtocolError("capacity ring_depth is " + std::to_string(c.ring_depth) + ", the limit is " +
                        std::to_string(kMaxDepth));
  }
}

// Writes the header of a new segment and, last, its ready word. `fd` is zero-filled and at least as large as the
// layout asks for (its pages reserved). Returns the bytes of the segment.
inline uint64_t format_segment(int fd, const wire::Capacities& capacities, uint64_t epoch) {
  check_capacities(capacities);
  const uint64_t bytes = wire::SegmentLayout(capacities).bytes;
  if (file_bytes(fd) < bytes) {
    throw ProtocolError("the segment's file has " + std::to_string(file_bytes(fd)) + " bytes, its layout needs " +
                        std::to_string(bytes));
  }
  const Mapping page(fd, wire::kPage);
  auto& header = page.as<wire::Header>(0);
  header.magic = wire::kMagic;
  header.layout_hash = wire::kLayoutHash;
  header.layout_version = wire::kLayoutVersion;
  header.header_bytes = sizeof(wire::Header);
  header.segment_bytes = bytes;
  header.epoch = epoch;
  header.owner_pid = static_cast<uint64_t>(getpid());
  header.owner_start_time = process_start_time(header.owner_pid);
  static_assert(sizeof(header.capacities) == sizeof(wire::Capacities));
  std::memcpy(header.capacities, &capacities, sizeof(capacities));
  pass(Point::kBeforeReady);
  store(header.ready, 1u, std::memory_order_release);  // [H1]
  return bytes;
}

inline void expect(const char* what, uint64_t found, uint64_t expected, const char* advice) {
  if (found == expected) return;
  std::ostringstream text;
  text << "the segment's " << what << " is " << std::hex << std::showbase << found << ", expected " << expected << ": "
       << advice;
  throw ProtocolError(text.str());
}

// A session's segment, mapped by one plane: typed access to its parts. Everything lives as long as this object.
class Session {
 public:
  // Maps and checks the header. Raises ProtocolError naming the first thing that is wrong, with both values.
  Session(int fd, uint64_t epoch, Plane plane)
      : mapping_(fd, mappable(fd)), capacities_(verify(fd, epoch)), layout_(capacities_) {
    // What the peer writes is read-only here. The data plane's steps stay writable: CUDA can page-lock only
    // writable memory on some devices, and there the array handed out is marked read-only instead.
    mapping_.make_read_only(layout_.header, sizeof(wire::Header));
    if (plane == Plane::kControl) {
      mapping_.make_read_only(layout_.data, sizeof(wire::PlaneState));
      mapping_.make_read_only(layout_.results, layout_.bytes - layout_.results);
    } else {
      mapping_.make_read_only(layout_.control, sizeof(wire::PlaneState));
    }
  }

  const wire::Header& header() const { return mapping_.as<wire::Header>(layout_.header); }
  const wire::Capacities& capacities() const { return capacities_; }
  const wire::SegmentLayout& layout() const { return layout_; }
  wire::PlaneState& control() const { return mapping_.as<wire::PlaneState>(layout_.control); }
  wire::PlaneState& data() const { return mapping_.as<wire::PlaneState>(layout_.data); }
  wire::Bell& control_bell() const { return mapping_.as<wire::Bell>(layout_.control_bell); }
  wire::Bell& data_bell() const { return mapping_.as<wire::Bell>(layout_.data_bell); }
  std::byte* steps() const { return mapping_.at(layout_.steps); }
  std::byte* results() const { return mapping_.at(layout_.results); }

 private:
  // The size to map, refused before mapping if not even a header can be there: touching a page behind the end of
  // a file is SIGBUS, not an error.
  static uint64_t mappable(int fd) {
    const uint64_t bytes = file_bytes(fd);
    if (bytes < wire::kPage) {
      throw ProtocolError("the segment's file has " + std::to_string(bytes) + " bytes, less than one page of " +
                          std::to_string(wire::kPage) + ": it is not created completely");
    }
    return bytes;
  }

  wire::Capacities verify(int fd, uint64_t epoch) const {
    const auto& header = mapping_.as<wire::Header>(0);
    const uint32_t ready = load(header.ready, std::memory_order_acquire);  // [H2] pairs with [H1]
    expect("ready word", ready, 1, "its creator died before finishing it, or it is no segment");
    expect("magic", header.magic, wire::kMagic, "this is no Twinplane segment");
    expect("layout hash", header.layout_hash, wire::kLayoutHash, "the two planes are of different builds");
    expect("header size", header.header_bytes, sizeof(wire::Header), "the two planes are of different builds");
    expect("epoch", header.epoch, epoch, "this is the segment of another session");
    wire::Capacities capacities{};
    std::memcpy(&capacities, header.capacities, sizeof(capacities));
    check_capacities(capacities);
    expect("size", header.segment_bytes, wire::SegmentLayout(capacities).bytes, "its capacities give another size");
    if (file_bytes(fd) < header.segment_bytes) {
      throw ProtocolError("the segment's file has " + std::to_string(file_bytes(fd)) + " bytes, its header says " +
                          std::to_string(header.segment_bytes));
    }
    return capacities;
  }

  Mapping mapping_;
  wire::Capacities capacities_;
  wire::SegmentLayout layout_;
};

}  // namespace twinplane::shm
