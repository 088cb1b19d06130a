#include "control_plane/core/prefix_tree.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <map>
#include <sstream>

namespace twinplane::core {
namespace {

// Children looked at for a block that begins like the one asked for. Each is a cache miss.
constexpr uint32_t kPartialCandidates = 4;

uint64_t mix(uint64_t h, uint64_t value) {
  h = (h ^ value) * 0x9e3779b97f4a7c15ull;
  return h ^ (h >> 29);
}

}  // namespace

PrefixTree::PrefixTree(BlockPool& pool, TokenCount block_size, uint64_t seed, uint64_t hash_mask, uint32_t slots)
    : pool_(pool),
      block_size_(block_size.value),
      seed_(seed),
      hash_mask_(hash_mask),
      arena_(slots != 0 ? slots : 2 * pool.total().value, block_size),
      nodes_(size_t{pool.total().value} + 1),  // a node has a block at least, the root none
      table_(std::bit_ceil(2 * nodes_.size())) {
  nodes_[kRootNode.value].pins = 1;  // always held, never listed
  free_nodes_.reserve(nodes_.size());
  for (uint32_t node = static_cast<uint32_t>(nodes_.size()); node-- > 1;) free_nodes_.push_back(node);
}

// --- lookup ----------------------------------------------------------------------------------------------------------

uint64_t PrefixTree::hash_of(uint32_t parent, const Namespace& key, const int32_t* block) const {
  uint64_t h = mix(seed_, parent);
  if (parent == kRootNode.value) {
    for (const uint64_t word : key) h = mix(h, word);
  }
  uint32_t i = 0;
  for (; i + 2 <= block_size_; i += 2) {
    uint64_t pair;
    std::memcpy(&pair, block + i, sizeof(pair));
    h = mix(h, pair);
  }
  if (i < block_size_) h = mix(h, static_cast<uint32_t>(block[i]));
  return mix(h, h >> 32) & hash_mask_;
}

// The child that begins with the block, whose hash is hash_of(parent, key, block).
uint32_t PrefixTree::find_child(uint32_t parent, const Namespace& key, const int32_t* block, uint64_t hash) const {
  const size_t mask = table_.size() - 1;
  for (size_t i = hash & mask; table_[i].node != kNone; i = (i + 1) & mask) {
    if (table_[i].hash != hash) continue;
    const Node& node = nodes_[table_[i].node];
    if (node.parent == parent && (parent != kRootNode.value || node.key == key) &&
        std::memcmp(arena_.tokens(node.slot()), block, block_size_ * sizeof(int32_t)) == 0) {
      return table_[i].node;
    }
  }
  return kNone;
}

// Blocks of the node's run that equal `tokens`, of the first `most`.
uint32_t PrefixTree::common_blocks(const Node& node, const int32_t* tokens, uint32_t most) const {
  constexpr uint32_t kStride = 64;  // blocks compared in one go
  const int32_t* const run = arena_.tokens(node.slot());
  const uint32_t count = std::min(node.size, most);
  const auto equal = [&](uint32_t at, uint32_t blocks) {
    const size_t offset = size_t{at} * block_size_;
    return std::memcmp(run + offset, tokens + offset, size_t{blocks} * block_size_ * sizeof(int32_t)) == 0;
  };
  uint32_t at = 0;
  while (at < count && equal(at, std::min(kStride, count - at))) at += std::min(kStride, count - at);
  while (at < count && equal(at, 1)) ++at;
  return at;
}

Match PrefixTree::match(const Namespace& key, std::span<const int32_t> tokens, StepSeq now) const {
  Match match;
  uint32_t node = kRootNode.value;
  std::span<const int32_t> rest = tokens;
  for (;;) {
    const uint32_t child =
        rest.size() >= block_size_ ? find_child(node, key, rest.data(), hash_of(node, key, rest.data())) : kNone;
    if (child == kNone) {
      find_partial(node, key, rest, now, match);
      return match;
    }
    const uint32_t blocks = common_blocks(nodes_[child], rest.data(), static_cast<uint32_t>(rest.size() / block_size_));
    match.node = {child};
    match.within = {blocks};
    match.blocks += {blocks};
    rest = rest.subspan(size_t{blocks} * block_size_);
    if (blocks < nodes_[child].size) {
      offer_partial(child, blocks, rest, now, match);
      return match;
    }
    node = child;
  }
}

void PrefixTree::find_partial(uint32_t parent, const Namespace& key, std::span<const int32_t> rest, StepSeq now,
                              Match& match) const {
  if (rest.empty()) return;
  uint32_t child = nodes_[parent].first_child;
  for (uint32_t i = 0; i < kPartialCandidates && child != kNone; ++i, child = nodes_[child].next_sibling) {
    if (parent == kRootNode.value && nodes_[child].key != key) continue;
    offer_partial(child, 0, rest, now, match);
  }
}

// The block at `at` of the node's run continues the match as far as its tokens agree.
void PrefixTree::offer_partial(uint32_t id, uint32_t at, std::span<const int32_t> rest, StepSeq now,
                               Match& match) const {
  const Node& node = nodes_[id];
  if (node.is_stale || node.filled >= now) return;
  const int32_t* const block = arena_.tokens(node.slot() + at);
  const size_t most = std::min<size_t>(rest.size(), block_size_);
  const uint32_t common = static_cast<uint32_t>(std::mismatch(block, block + most, rest.data()).first - block);
  if (common <= match.partial.value) return;
  match.partial = {common};
  match.partial_node = {id};
  match.partial_block = *arena_.blocks(node.slot() + at);
}

BlockCount PrefixTree::cached_on(const Match& match) const {
  BlockCount cached;
  uint32_t blocks = match.within.value;
  for (uint32_t id = match.node.value; id != kRootNode.value && !nodes_[id].is_held(); blocks = nodes_[id].size) {
    cached += {blocks};
    id = nodes_[id].parent;
  }
  if (match.partial.value != 0 && !nodes_[match.partial_node.value].is_held()) {
    // Held whole for the copy's sake; the part that matched is counted above.
    const uint32_t own = match.partial_node == match.node ? match.within.value : 0;
    cached += {nodes_[match.partial_node.value].size - own};
  }
  return cached;
}

BlockCount PrefixTree::held_alone(NodeId id) const {
  BlockCount blocks;
  for (uint32_t n = id.value; n != kRootNode.value && nodes_[n].pins + nodes_[n].live_children == 1;
       n = nodes_[n].parent) {
    blocks += {nodes_[n].size};
  }
  return blocks;
}

// --- holding ---------------------------------------------------------------------------------------------------------

NodeId PrefixTree::pin(const Match& match, BlockId* blocks) {
  uint32_t node = match.node.value;
  if (match.within.value < nodes_[node].size) node = split(node, match.within.value);
  uint32_t end = match.blocks.value;
  for (uint32_t n = node; n != kRootNode.value; n = nodes_[n].parent) {
    end -= nodes_[n].size;
    std::copy_n(arena_.blocks(nodes_[n].slot()), nodes_[n].size, blocks + end);
  }
  assert(end == 0);
  add_pin({node});
  return {node};
}

NodeId PrefixTree::pin_part(NodeId end, BlockCount path, BlockCount blocks) {
  uint32_t id = end.value;
  uint32_t begin = path.value - nodes_[id].size;  // of the node's run in the path
  while (id != kRootNode.value && begin >= blocks.value) {
    id = nodes_[id].parent;
    begin -= nodes_[id].size;
  }
  if (begin + nodes_[id].size > blocks.value) id = split(id, blocks.value - begin);
  add_pin({id});
  return {id};
}

void PrefixTree::add_pin(NodeId id) {
  Node& node = nodes_[id.value];
  if (!node.is_held()) held_up(id.value);
  if (!node.is_live()) live_up(id.value);
  ++node.pins;
}

void PrefixTree::cool(NodeId id) {
  Node& node = nodes_[id.value];
  assert(node.pins != 0);
  --node.pins;
  ++node.cooling;
  if (!node.is_live()) live_down(id.value);
}

void PrefixTree::thaw(NodeId id) {
  Node& node = nodes_[id.value];
  assert(node.cooling != 0);
  --node.cooling;
  if (!node.is_held()) held_down(id.value);
}

// The node becomes live, and with it every ancestor that was not.
void PrefixTree::live_up(uint32_t id) {
  for (;;) {
    live_ += {nodes_[id].size};
    id = nodes_[id].parent;
    const bool was_live = nodes_[id].is_live();
    ++nodes_[id].live_children;
    if (was_live) return;
  }
}

void PrefixTree::live_down(uint32_t id) {
  for (;;) {
    live_ -= {nodes_[id].size};
    id = nodes_[id].parent;
    --nodes_[id].live_children;
    if (nodes_[id].is_live()) return;
  }
}

void PrefixTree::held_up(uint32_t id) {
  for (;;) {
    held_ += {nodes_[id].size};
    list_remove(id);
    id = nodes_[id].parent;
    const bool was_held = nodes_[id].is_held();
    ++nodes_[id].held_children;
    if (was_held) return;
  }
}

void PrefixTree::held_down(uint32_t id) {
  for (;;) {
    const uint32_t parent = nodes_[id].parent;
    held_ -= {nodes_[id].size};
    if (nodes_[id].is_stale) {
      drop_blocks(nodes_[id], nodes_[id].size);
      remove(id);
    } else {
      list_push(id);
    }
    --nodes_[parent].held_children;
    if (nodes_[parent].is_held()) return;
    id = parent;
  }
}

// --- growing ---------------------------------------------------------------------------------------------------------

PrefixTree::Appended PrefixTree::append(NodeId at, const Namespace& key, const int32_t* tokens, const BlockId* blocks,
                                        BlockCount from, BlockCount to, StepSeq now) {
  const auto tokens_at = [&](BlockCount block) { return tokens + size_t{block.value} * block_size_; };
  Node& node = nodes_[at.value];
  // A forgotten path grows no more: nobody could find what hangs on it.
  if (from == to || node.is_stale) return {at, from};
  const bool is_only_mine = at != kRootNode && node.pins == 1 && node.cooling == 0 && node.first_child == kNone;
  if (is_only_mine && extend(node, tokens_at(from), blocks + from.value, (to - from).value)) {
    node.filled = now;
    return {at, to};
  }
  while (from < to) {
    const uint64_t hash = hash_of(at.value, key, tokens_at(from));
    if (find_child(at.value, key, tokens_at(from), hash) != kNone) break;
    const uint32_t child = make_node(at.value, key, hash, tokens_at(from), blocks + from.value, (to - from).value);
    if (child == kNone) break;
    nodes_[child].filled = now;
    add_pin({child});
    from += {nodes_[child].size};
    // The old pin goes without cooling: the new one holds the same path.
    Node& old = nodes_[at.value];
    assert(old.pins != 0 && old.live_children != 0);
    --old.pins;
    if (old.filler != nullptr) old.filler = nullptr;
    at = {child};
  }
  return {at, from};
}

void PrefixTree::write_run(const Node& node, uint32_t at, const int32_t* tokens, const BlockId* blocks,
                           uint32_t count) {
  std::copy_n(tokens, size_t{count} * block_size_, arena_.tokens(node.slot() + at));
  std::copy_n(blocks, count, arena_.blocks(node.slot() + at));
}

// The run of a held node grows in place, or moves to a larger extent. False if there is none.
bool PrefixTree::extend(Node& node, const int32_t* tokens, const BlockId* blocks, uint32_t count) {
  const uint32_t size = node.size + count;
  if (node.begin + size > node.extent.capacity) {
    const Extent old = node.extent;
    if (!move_run(node, size)) return false;
    arena_.free(old);
  }
  write_run(node, node.size, tokens, blocks, count);
  node.size = size;
  live_ += {count};
  held_ += {count};
  total_ += {count};
  return true;
}

// A new child with the first blocks of `blocks`, as many as there is room for; unheld, and in no list yet: the caller
// pins it at once. kNone if there is no room at all.
uint32_t PrefixTree::make_node(uint32_t parent, const Namespace& key, uint64_t hash, const int32_t* tokens,
                               const BlockId* blocks, uint32_t count) {
  if (free_nodes_.empty()) return kNone;
  const Extent extent = arena_.allocate(count);
  if (extent.capacity == 0) return kNone;
  const uint32_t id = free_nodes_.back();
  free_nodes_.pop_back();
  Node& node = nodes_[id] = Node{};
  node.extent = extent;
  node.size = std::min(count, extent.capacity);
  node.key = key;
  node.hash = hash;
  write_run(node, 0, tokens, blocks, node.size);
  adopt_child(parent, id);
  table_insert(id);
  total_ += {node.size};
  list_push(id);
  return id;
}

// The first `at` blocks of the node become its parent; who pinned the node goes on pinning its end. The shorter part
// gets an extent of its own; if there is none, both go on living in the old one. (Then the prefix can not grow over the
// suffix: it grows only without children, and they hang on it.)
uint32_t PrefixTree::split(uint32_t id, uint32_t at) {
  assert(at != 0 && at < nodes_[id].size && !free_nodes_.empty());  // each node has a block, and this one two
  const uint32_t prefix_id = free_nodes_.back();
  free_nodes_.pop_back();
  Node& node = nodes_[id];
  Node& prefix = nodes_[prefix_id] = Node{};
  prefix.key = node.key;
  prefix.hash = node.hash;
  prefix.filled = node.filled;
  prefix.is_stale = node.is_stale;
  prefix.extent = node.extent;
  prefix.begin = node.begin;
  prefix.size = at;
  const uint32_t parent = node.parent;
  const bool is_live = node.is_live(), is_held = node.is_held();
  if (!node.is_stale) table_erase(id);
  orphan(id);
  node.begin += at;
  node.size -= at;
  Node& shorter = at < node.size ? prefix : node;
  Node& longer = at < node.size ? node : prefix;
  if (move_run(shorter, shorter.size)) {
    shrink(longer);
  } else {
    arena_.share(node.extent);
  }
  adopt_child(parent, prefix_id);
  adopt_child(prefix_id, id);
  prefix.live_children = is_live;
  prefix.held_children = is_held;
  if (!is_held) list_insert_after(prefix_id, id);
  if (!node.is_stale) {
    table_insert(prefix_id);
    node.hash = hash_of(prefix_id, node.key, arena_.tokens(node.slot()));
    table_insert(id);
  }
  return prefix_id;
}

// To an extent of its own with room for `capacity` blocks; the old one is not freed. False if there is none.
bool PrefixTree::move_run(Node& node, uint32_t capacity) {
  const Extent extent = arena_.allocate(capacity);
  if (extent.capacity < capacity) {
    if (extent.capacity != 0) arena_.free(extent);
    return false;
  }
  std::copy_n(arena_.tokens(node.slot()), size_t{node.size} * block_size_, arena_.tokens(extent.slot));
  std::copy_n(arena_.blocks(node.slot()), node.size, arena_.blocks(extent.slot));
  node.extent = extent;
  node.begin = 0;
  return true;
}

// --- shrinking -------------------------------------------------------------------------------------------------------

BlockCount PrefixTree::evict(BlockCount most) {
  assert(oldest_ != kNone && most != BlockCount{0});
  const uint32_t id = oldest_;
  Node& node = nodes_[id];
  assert(node.first_child == kNone && !node.is_held());
  const BlockCount dropped{std::min(most.value, node.size)};
  drop_blocks(node, dropped.value);
  if (node.size == 0) {
    list_remove(id);
    remove(id);
  } else {
    shrink(node);
  }
  prefetch_eviction();
  return dropped;
}

// The last `count` blocks of the run.
void PrefixTree::drop_blocks(Node& node, uint32_t count) {
  total_ -= {count};
  for (; count != 0; --count) pool_.put(*arena_.blocks(node.slot() + --node.size));
}

// What the next evict() will look at: each is a cache miss, and there they would come one behind the other.
void PrefixTree::prefetch_eviction() const {
  if (oldest_ == kNone) return;
  const Node& node = nodes_[oldest_];
  __builtin_prefetch(arena_.blocks(node.slot() + node.size - 1));
  __builtin_prefetch(&table_[node.hash & (table_.size() - 1)]);
  for (const uint32_t neighbour : {node.newer, node.previous_sibling, node.next_sibling}) {
    if (neighbour != kNone) __builtin_prefetch(&nodes_[neighbour], 1);
  }
}

// An empty leaf goes.
void PrefixTree::remove(uint32_t id) {
  Node& node = nodes_[id];
  assert(node.size == 0 && node.first_child == kNone);
  if (!node.is_stale) table_erase(id);
  orphan(id);
  arena_.free(node.extent);
  free_nodes_.push_back(id);
}

void PrefixTree::reset() {
  while (oldest_ != kNone) evict({nodes_[oldest_].size});
  for (uint32_t id = 1; id < nodes_.size(); ++id) {
    Node& node = nodes_[id];
    if (node.size == 0 || node.is_stale) continue;
    table_erase(id);
    node.is_stale = true;
    node.filler = nullptr;
  }
  nodes_[kRootNode.value].filler = nullptr;
}

// --- links -----------------------------------------------------------------------------------------------------------

void PrefixTree::adopt_child(uint32_t parent, uint32_t child) {
  Node& node = nodes_[child];
  node.parent = parent;
  node.previous_sibling = kNone;
  node.next_sibling = nodes_[parent].first_child;
  if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = child;
  nodes_[parent].first_child = child;
}

void PrefixTree::orphan(uint32_t child) {
  const Node& node = nodes_[child];
  (node.previous_sibling == kNone ? nodes_[node.parent].first_child : nodes_[node.previous_sibling].next_sibling) =
      node.next_sibling;
  if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
}

void PrefixTree::list_push(uint32_t id) {
  Node& node = nodes_[id];
  node.older = newest_;
  node.newer = kNone;
  (newest_ == kNone ? oldest_ : nodes_[newest_].newer) = id;
  newest_ = id;
}

void PrefixTree::list_remove(uint32_t id) {
  const Node& node = nodes_[id];
  (node.older == kNone ? oldest_ : nodes_[node.older].newer) = node.newer;
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = node.older;
}

void PrefixTree::list_insert_after(uint32_t id, uint32_t before) {
  Node& node = nodes_[id];
  node.older = before;
  node.newer = nodes_[before].newer;
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = id;
  nodes_[before].newer = id;
}

void PrefixTree::table_insert(uint32_t id) {
  const size_t mask = table_.size() - 1;
  size_t i = nodes_[id].hash & mask;
  while (table_[i].node != kNone) i = (i + 1) & mask;
  table_[i] = {nodes_[id].hash, id};
}

// The hole is filled by the entries behind it that would not be found any more.
void PrefixTree::table_erase(uint32_t id) {
  const size_t mask = table_.size() - 1;
  size_t hole = nodes_[id].hash & mask;
  while (table_[hole].node != id) hole = (hole + 1) & mask;
  for (size_t i = (hole + 1) & mask; table_[i].node != kNone; i = (i + 1) & mask) {
    const size_t distance_from_home = (i - (table_[i].hash & mask)) & mask;
    if (distance_from_home >= ((i - hole) & mask)) {
      table_[hole] = table_[i];
      hole = i;
    }
  }
  table_[hole].node = kNone;
}

// --- for tests -------------------------------------------------------------------------------------------------------

std::string PrefixTree::check(const std::function<void(BlockId)>& visit) const {
  std::ostringstream wrong;
  BlockCount live, held, total;
  std::vector<uint32_t> live_children(nodes_.size()), held_children(nodes_.size());
  std::map<uint32_t, uint32_t> extents;  // those that were split may be shared
  size_t found = 0;
  for (uint32_t id = 1; id < nodes_.size(); ++id) {
    const Node& node = nodes_[id];
    if (node.size == 0) continue;
    ++found;
    for (uint32_t i = 0; i < node.size; ++i) visit(*arena_.blocks(node.slot() + i));
    total += {node.size};
    if (node.is_live()) live += {node.size}, ++live_children[node.parent];
    if (node.is_held()) held += {node.size}, ++held_children[node.parent];
    extents[node.extent.slot] = node.extent.capacity;
    if (node.begin + node.size > node.extent.capacity) wrong << "node " << id << " overflows its extent; ";
    const int32_t* const begin = arena_.tokens(node.slot());
    if (!node.is_stale && find_child(node.parent, node.key, begin, hash_of(node.parent, node.key, begin)) != id) {
      wrong << "node " << id << " is not found by its tokens; ";
    }
  }
  for (uint32_t id = 0; id < nodes_.size(); ++id) {
    if (nodes_[id].size == 0 && id != kRootNode.value) continue;
    if (nodes_[id].live_children != live_children[id] || nodes_[id].held_children != held_children[id]) {
      wrong << "node " << id << " counts " << nodes_[id].live_children << " live and " << nodes_[id].held_children
            << " held children, has " << live_children[id] << " and " << held_children[id] << "; ";
    }
  }
  if (live != live_ || held != held_ || total != total_) wrong << "the totals differ from the nodes'; ";
  uint32_t slots = 0;
  for (const auto& [slot, capacity] : extents) slots += capacity;
  if (slots + arena_.num_free() != arena_.size()) wrong << "the arena lost slots; ";
  if (found + free_nodes_.size() + 1 != nodes_.size()) wrong << "nodes are lost; ";
  uint32_t cached = 0;
  for (uint32_t id = oldest_; id != kNone; id = nodes_[id].newer) {
    cached += nodes_[id].size;
    if (nodes_[id].is_held()) wrong << "node " << id << " is held and listed as cached; ";
    // Children are older: they go first.
    for (uint32_t child = nodes_[id].first_child; child != kNone; child = nodes_[child].next_sibling) {
      bool is_older = false;
      for (uint32_t n = nodes_[id].older; n != kNone && !is_older; n = nodes_[n].older) is_older = n == child;
      if (!is_older) wrong << "child " << child << " would outlive node " << id << "; ";
    }
  }
  if (cached != this->cached().value) wrong << "the list of cached nodes is incomplete; ";
  return wrong.str();
}

}  // namespace twinplane::core
