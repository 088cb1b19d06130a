// Sequences of one request: n parallel samples, or the beams of a search. They share the blocks of their prompt, come
// onto the device together and leave it together (the paper's gang: section 4.5 of arXiv 2309.06180).
//
//   admitted   the first computes the prompt; the others have a row and the blocks behind the shared ones, and follow
//   forked     once the step that computes the prompt's last token is sent: shared blocks are referenced, the block in
//              which the prompt ends is copied, and each computes the last prompt token again, to sample from it
//   alone      from here on each is scheduled as any other
//
// Beams differ in that nobody follows before the first selection: it spreads the first beam over all rows.
#pragma once

#include <memory>
#include <vector>

#include "control_plane/core/beam_search.hpp"
#include "control_plane/core/request.hpp"

namespace twinplane::core {

struct Group {
  std::vector<Sequence*> members;     // by index; null once ended. The core's.
  uint32_t num_following = 0;         // members whose prompt the first one computes
  std::unique_ptr<BeamSearch> beams;  // null: samples

  // Between the gate and the core, which takes them one by one: all but the first.
  std::vector<std::unique_ptr<Sequence>> newcomers;

  // The first that is live; null if none is.
  Sequence* first() const {
    for (Sequence* const member : members) {
      if (member != nullptr) return member;
    }
    return nullptr;
  }

  // visit(member) for each that is live.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (Sequence* const member : members) {
      if (member != nullptr) visit(*member);
    }
  }
};

// All sequences of a request: the first, which alone or through its group owns the others. Throws std::bad_alloc.
std::unique_ptr<Sequence> make_request(RequestId id, std::span<const int32_t> prompt, RequestParams params,
                                       TokenCount block_size, Nanos now);

}  // namespace twinplane::core
