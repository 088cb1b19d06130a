// Which blocks a sequence has: its own, those it shares through the prefix tree, and what becomes of them when it
// leaves.
//
//      blocks   [ in the tree, pinned once at `node` | own: counted in the pool ]
//               0                              tree_blocks                 num_blocks
//
// Prompt blocks join the tree when the step that fills them is sent: every later step runs behind it on the same device
// queue, and within a step all KV is written before any is read. What was generated joins when the sequence leaves.
// If the step fails, the session ends, and the tree with it.
#pragma once

#include "control_plane/core/block_pool.hpp"
#include "control_plane/core/fence.hpp"
#include "control_plane/core/prefix_tree.hpp"
#include "control_plane/core/request.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

class BlockManager {
 public:
  // `max_cooling`: pins that may wait for a fence at once.
  BlockManager(BlockCount total, TokenCount block_size, size_t max_cooling);

  BlockCount total() const { return pool_.total(); }
  BlockCount free() const { return pool_.free() + tree_.cached(); }          // usable now
  BlockCount soon_free() const { return pool_.fenced() + tree_.cooling(); }  // when the steps in flight have retired
  BlockCount cached() const { return tree_.cached(); }                       // free, and worth something
  BlockCount referenced() const { return total() - free() - soon_free(); }

  // The longest prefix of the sequence's tokens that is cached; at least one token is left to compute, because only
  // computing gives logits. `now`: the step being planned.
  Match find(const Sequence& sequence, StepSeq now) const;

  // Somebody on the device is about to compute the block that follows the match: worth waiting for.
  bool is_being_computed(const Sequence& sequence, const Match& match) const;

  // Blocks that using the match takes out of free(), beside those acquired.
  BlockCount cached_on(const Match& match) const { return tree_.cached_on(match); }

  // Blocks that would be free (or soon free) if the sequence let go of its own. Never too many: what it shares with
  // others that leave with it is not counted.
  BlockCount reclaimable(const Sequence& sequence) const;

  // The sequence, which has no blocks, gets those that matched; num_computed says so.
  void attach(Sequence& sequence, const Match& match);

  // One more block of its own, the next one of the sequence; there must be a free one.
  BlockId grow(Sequence& sequence);

  // The source of a partial match is kept until step `now` has retired; its tokens count as computed.
  void copy_partial(Sequence& sequence, const Match& match, StepSeq now);

  // The prompt's blocks that are full now, by the step `now`, can be found by others.
  void publish(Sequence& sequence, StepSeq now);

  // Gives up all its blocks, behind the fence. What is full stays in the tree, if `keep`.
  void release(Sequence& sequence, StepSeq fence, bool keep);

  // So many steps have retired: opens their fences.
  void retire(StepSeq retired);

  void reset_cache() { tree_.reset(); }

  const BlockPool& pool() const { return pool_; }
  const PrefixTree& tree() const { return tree_; }

 private:
  void keep_full_blocks(Sequence& sequence, StepSeq fence);
  void stop_filling(Sequence& sequence);
  void cool(NodeId node, StepSeq fence);

  BlockPool pool_;
  PrefixTree tree_;
  const TokenCount block_size_;
  FenceQueue<NodeId> cooling_;
  StepSeq retired_;
};

}  // namespace twinplane::core
