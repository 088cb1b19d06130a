// Which blocks a sequence has: its own, those it shares through the prefix tree, and what becomes of them when it
// leaves.
//
//      blocks   [ in the tree, pinned once at `node` | own: counted in the pool, maybe shared with its group ]
//               0                              tree_blocks                                              num_blocks
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

  // find() will be asked about the sequence soon.
  void prefetch_find(const Sequence& sequence) const {
    if (sequence.prompt_tokens >= block_size_) tree_.prefetch_match(sequence.params.cache_key, sequence.tokens);
  }

  // Somebody on the device is about to compute the block that follows the match: worth waiting for.
  bool is_being_computed(const Sequence& sequence, const Match& match) const;

  // Blocks that using the match takes out of free(), beside those acquired.
  BlockCount cached_on(const Match& match) const { return tree_.cached_on(match); }

  // Blocks that would be free (or soon free) if the sequence let go of its own. Never too many: what it shares with
  // others that leave with it is not counted.
  BlockCount reclaimable(const Sequence& sequence) const;

  // The sequence, which has no blocks, gets those that matched; num_computed says so.
  void attach(Sequence& sequence, const Match& match);

  // A sequence that follows the first of its group: it has no blocks, and gets all from number `shared` on that it
  // needs to be `blocks` long.
  void attach_tail(Sequence& sequence, BlockCount shared, BlockCount blocks);

  // The child's first `blocks` blocks are the parent's from now on; it has none there yet. All of them are full.
  void fork(const Sequence& parent, Sequence& child, BlockCount blocks);

  // Block number `index` of the parent stays as it is until the child has copied it.
  void keep_copy_source(const Sequence& parent, Sequence& child, BlockCount index);
  // The copy is sent, or will never be: the source is reusable behind the fence.
  void drop_copy_source(Sequence& child, StepSeq fence);

  // The sequence is about to be forked from another one: gives up its blocks, but for its last one if nobody else has
  // it; that is returned, and the sequence's no more. kNoBlock if there is none.
  BlockId release_but_one(Sequence& sequence, StepSeq fence);

  // It has a last block, of its own, that nobody else has: release_but_one() would keep it.
  bool has_exclusive_last(const Sequence& sequence) const {
    return sequence.num_blocks > sequence.first_own_block() &&
           pool_.references(sequence.blocks[(sequence.num_blocks - BlockCount{1}).value]) == 1;
  }

  // Appends a block that release_but_one() returned.
  void take(Sequence& sequence, BlockId block) {
    sequence.blocks[sequence.num_blocks.value] = block;
    ++sequence.num_blocks;
  }

  // So many blocks are about to be asked for, one by one: what of them must be evicted is evicted now, run by run.
  // There must be so many free or cached ones.
  void make_room(BlockCount blocks);

  // One more block of its own, the next one of the sequence; there must be a free one.
  BlockId grow(Sequence& sequence);

  // Gives back those of its own blocks, from number `blocks` on, that nothing was written to after all.
  void shrink(Sequence& sequence, BlockCount blocks, StepSeq fence);

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
  BlockCount end_of_own(const Sequence& sequence, BlockCount most) const;
  bool append_own(Sequence& sequence, BlockCount to, StepSeq now);
  void stop_filling(Sequence& sequence);
  void cool(NodeId node, StepSeq fence);

  BlockPool pool_;
  PrefixTree tree_;
  const TokenCount block_size_;
  FenceQueue<NodeId> cooling_;
  StepSeq retired_;
};

}  // namespace twinplane::core
