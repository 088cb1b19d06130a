#include "control_plane/core/block_manager.hpp"

#include <algorithm>
#include <cassert>
#include <random>

namespace twinplane::core {
namespace {

// So that nobody outside can know which prompts share a slot of the tree's table.
uint64_t random_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

BlockManager::BlockManager(BlockCount total, TokenCount block_size, size_t max_cooling)
    : pool_(total), tree_(pool_, block_size, random_seed()), block_size_(block_size), cooling_(max_cooling) {}

Match BlockManager::find(const Sequence& sequence, StepSeq now) const {
  if (!sequence.params.uses_cache) return {};
  const TokenCount most = std::min(sequence.num_tokens, sequence.known() - TokenCount{1});
  return tree_.match(sequence.params.cache_key, {sequence.tokens, most.value}, now);
}

bool BlockManager::is_being_computed(const Sequence& sequence, const Match& match) const {
  const Sequence* const filler = tree_.filler(match.node);
  if (filler == nullptr || !sequence.params.uses_cache || match.blocks != filler->tree_blocks) return false;
  const uint32_t from = match.blocks.value * block_size_.value;
  const uint32_t to = from + block_size_.value;
  if (to > filler->prompt_tokens.value || to >= sequence.known().value || to > sequence.num_tokens.value) return false;
  return std::equal(filler->tokens + from, filler->tokens + to, sequence.tokens + from);
}

BlockCount BlockManager::reclaimable(const Sequence& sequence) const {
  BlockCount blocks = tree_.held_alone(sequence.node);
  for (uint32_t i = sequence.first_own_block().value; i < sequence.num_blocks.value; ++i) {
    if (pool_.references(sequence.blocks[i]) == 1) ++blocks;
  }
  return blocks;
}

void BlockManager::attach(Sequence& sequence, const Match& match) {
  assert(sequence.num_blocks == BlockCount{0});
  sequence.node = tree_.pin(match, sequence.blocks);
  sequence.tree_blocks = sequence.num_blocks = match.blocks;
  sequence.num_computed = {match.blocks.value * block_size_.value};
}

void BlockManager::attach_tail(Sequence& sequence, BlockCount shared, BlockCount blocks) {
  attach(sequence, Match{});
  sequence.missing_blocks = sequence.num_blocks = shared;
  make_room(blocks - shared);
  while (sequence.num_blocks < blocks) grow(sequence);
}

void BlockManager::fork(const Sequence& parent, Sequence& child, BlockCount blocks) {
  assert(child.tree_blocks == BlockCount{0} && blocks <= parent.num_blocks);
  // The tree's share of it ends where the child's does, not where the parent's did.
  const BlockCount pinned = std::min(blocks, parent.tree_blocks);
  const NodeId node = tree_.pin_part(parent.node, parent.tree_blocks, pinned);
  cool(child.node, {0});
  child.node = node;
  child.tree_blocks = pinned;
  std::copy_n(parent.blocks, blocks.value, child.blocks);
  for (uint32_t i = pinned.value; i < blocks.value; ++i) pool_.share(child.blocks[i]);
  child.missing_blocks = {0};
  child.num_blocks = std::max(child.num_blocks, blocks);
  child.num_computed = {blocks.value * block_size_.value};
}

void BlockManager::keep_copy_source(const Sequence& parent, Sequence& child, BlockCount index) {
  child.copy_source = parent.blocks[index.value];
  child.has_copy_source = true;
  if (index < parent.tree_blocks) {
    child.copy_node = parent.node;
    tree_.pin_again(parent.node);
  } else {
    pool_.share(child.copy_source);
  }
}

void BlockManager::drop_copy_source(Sequence& child, StepSeq fence) {
  if (!child.has_copy_source) return;
  child.has_copy_source = false;
  if (child.copy_node != kRootNode) {
    cool(child.copy_node, fence);
    child.copy_node = kRootNode;
  } else {
    pool_.release(child.copy_source, fence);
  }
}

BlockId BlockManager::release_but_one(Sequence& sequence, StepSeq fence) {
  BlockId kept = kNoBlock;
  if (has_exclusive_last(sequence)) {
    --sequence.num_blocks;
    kept = sequence.blocks[sequence.num_blocks.value];
  }
  release(sequence, fence, false);
  tree_.pin_again(kRootNode);
  return kept;
}

void BlockManager::make_room(BlockCount blocks) {
  while (pool_.free() < blocks) tree_.evict(blocks - pool_.free());
}

BlockId BlockManager::grow(Sequence& sequence) {
  assert(sequence.num_blocks < sequence.block_capacity);
  make_room({1});
  const BlockId block = pool_.acquire();
  sequence.blocks[sequence.num_blocks.value] = block;
  ++sequence.num_blocks;
  return block;
}

void BlockManager::shrink(Sequence& sequence, BlockCount blocks, StepSeq fence) {
  assert(blocks >= sequence.first_own_block());
  while (sequence.num_blocks > blocks) {
    --sequence.num_blocks;
    pool_.release(sequence.blocks[sequence.num_blocks.value], fence);
  }
}

void BlockManager::copy_partial(Sequence& sequence, const Match& match, StepSeq now) {
  tree_.pin_again(match.partial_node);
  cool(match.partial_node, now + StepSeq{1});
  sequence.num_computed += match.partial;
}

void BlockManager::publish(Sequence& sequence, StepSeq now) {
  if (!sequence.params.uses_cache) return;
  const BlockCount full{std::min(sequence.num_computed, sequence.prompt_tokens).value / block_size_.value};
  if (const BlockCount mine = end_of_own(sequence, full); mine > sequence.tree_blocks) {
    stop_filling(sequence);  // at the node where its path ended so far
    append_own(sequence, mine, now);
  }
  const bool goes_on = sequence.num_computed < sequence.prompt_tokens;
  if (goes_on && sequence.tree_blocks == full) tree_.set_filler(sequence.node, &sequence);
  if (!goes_on) stop_filling(sequence);
}

void BlockManager::stop_filling(Sequence& sequence) {
  if (tree_.filler(sequence.node) == &sequence) tree_.set_filler(sequence.node, nullptr);
}

void BlockManager::release(Sequence& sequence, StepSeq fence, bool keep) {
  stop_filling(sequence);
  if (keep && sequence.params.uses_cache) keep_full_blocks(sequence, fence);
  drop_copy_source(sequence, fence);
  for (uint32_t i = sequence.num_blocks.value; i > sequence.first_own_block().value; --i) {
    pool_.release(sequence.blocks[i - 1], fence);
  }
  cool(sequence.node, fence);
  sequence.node = kRootNode;
  sequence.tree_blocks = sequence.num_blocks = sequence.missing_blocks = {0};
}

// Blocks whose tokens all are known and computed go to the tree, as far as nobody else counts on them. Where the tree
// has other blocks with the same tokens already, its own go back.
void BlockManager::keep_full_blocks(Sequence& sequence, StepSeq fence) {
  const BlockCount full{std::min(sequence.num_computed, sequence.num_tokens).value / block_size_.value};
  const BlockCount mine = end_of_own(sequence, full);
  if (mine == sequence.tree_blocks || tree_.is_stale(sequence.node)) return;
  if (append_own(sequence, mine, fence)) return;
  // The tree goes on with the same tokens in other blocks: behind the longest match its own may follow.
  Match match = tree_.match(sequence.params.cache_key, {sequence.tokens, mine.value * block_size_.value}, fence);
  match.partial = {0};
  // Cached blocks are free ones, and somebody may be counting on them: whoever leaves takes none away.
  if (match.blocks <= sequence.tree_blocks || tree_.cached_on(match) != BlockCount{0}) return;
  for (uint32_t i = sequence.tree_blocks.value; i < match.blocks.value; ++i) pool_.release(sequence.blocks[i], fence);
  const NodeId node = tree_.pin(match, sequence.blocks);
  cool(sequence.node, fence);
  sequence.node = node;
  sequence.tree_blocks = match.blocks;
  append_own(sequence, mine, fence);
}

// Where those of its blocks end, up to `most`, that are not the tree's and nobody else's: what members of its group
// share outside the tree stays there.
BlockCount BlockManager::end_of_own(const Sequence& sequence, BlockCount most) const {
  BlockCount end = sequence.tree_blocks;
  while (end < most && pool_.references(sequence.blocks[end.value]) == 1) ++end;
  return end;
}

// Gives the tree the sequence's own blocks up to `to`; true if it took any, or there were none.
bool BlockManager::append_own(Sequence& sequence, BlockCount to, StepSeq now) {
  const BlockCount from = sequence.tree_blocks;
  const auto [node, taken] =
      tree_.append(sequence.node, sequence.params.cache_key, sequence.tokens, sequence.blocks, from, to, now);
  for (uint32_t i = from.value; i < taken.value; ++i) pool_.hand_over(sequence.blocks[i]);
  sequence.node = node;
  sequence.tree_blocks = taken;
  return taken > from || from == to;
}

void BlockManager::cool(NodeId node, StepSeq fence) {
  tree_.cool(node);
  if (node == kRootNode || fence <= retired_) {  // the root has no blocks that could be reused
    tree_.thaw(node);
  } else {
    cooling_.push(node, fence);
  }
}

void BlockManager::retire(StepSeq retired) {
  retired_ = retired;
  pool_.retire(retired);
  cooling_.open(retired, [this](NodeId node) { tree_.thaw(node); });
}

}  // namespace twinplane::core
