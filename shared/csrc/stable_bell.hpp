// A bell at a fixed address. The control plane's core is rung by its own threads (command producers) before, during and
// after a session, and by the data plane during one; but each session has a segment, and so a bell page, of its own.
// StableBell keeps one page of address space for life and puts different memory under it.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "shared/csrc/bell.hpp"
#include "shared/csrc/wire.hpp"

namespace twinplane::shm {

class StableBell {
 public:
  // Anonymous memory to begin with: a futex works there as well, so the owner can sleep without a session.
  StableBell() { place(nullptr, 0, -1, 0); }
  ~StableBell() { munmap(page_, wire::kPage); }
  StableBell(const StableBell&) = delete;
  StableBell& operator=(const StableBell&) = delete;

  // Puts the bell page of a segment (`offset` = SegmentLayout::control_bell) under the address. The file may be closed
  // afterwards. Only the owner of the bell may call this, that is, the thread that waits on it, while it is awake.
  //
  // MAP_FIXED replaces the page under the address space's lock: a thread ringing meanwhile sees the old page or the
  // new one, or faults and waits for the lock; never a hole. If its ring went into the old page, it is forgotten, which
  // is harmless, because its news was visible before it rang and the owner checks all its news after rebinding and
  // before it sleeps again (INV-1). If the ring went into the new page, it is a ring like any other.
  void rebind(int fd, uint64_t offset) { place(page_, MAP_FIXED, fd, static_cast<off_t>(offset)); }

  // Back to anonymous memory, which lets go of the segment. Same rules as rebind().
  void unbind() { place(page_, MAP_FIXED, -1, 0); }

  // The same object for life, whatever lies under it.
  wire::Bell& bell() const { return *static_cast<wire::Bell*>(page_); }

 private:
  void place(void* address, int fixed, int fd, off_t offset) {
    const int anonymous = fd < 0 ? MAP_ANONYMOUS : 0;
    void* at =
        mmap(address, wire::kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE | fixed | anonymous, fd, offset);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the bell page");
    if (page_ == nullptr) page_ = at;  // never stored again: other threads read it
  }

  void* page_ = nullptr;
};

}  // namespace twinplane::shm
