// The prefix cache: which blocks hold the KV of which tokens. A path-compressed radix tree over whole blocks.
//
//   root --[ system prompt: 31 blocks ]--+--[ question A: 4 blocks ]
//                                        +--[ question B: 2 ]--+--[ answer, next question: 9 ]
//                                                              +--[ another answer: 5 ]
//
// A node is a run: the tokens and the block ids of consecutive blocks, contiguous in memory. A hash finds the child,
// but only equal tokens (and, at the root, an equal namespace) make a match: no collision ever shares KV. (Radix tree
// as prefix cache: Zheng et al., "SGLang", 2024, section 3; the runs are of whole blocks here.)
//
// Who holds what. A sequence pins the node at which its path through the tree ends, once, however long the path is:
//
//   live     pinned by a sequence, or an ancestor of such a node
//   cooling  not live, but its last pins wait for the fence of the steps in flight (INV-3)
//   cached   neither: its blocks may be taken, least recently used first, the end of a run before its beginning
//
// A node becomes cached only after its children, so the list of cached nodes, ordered by when they became it, always
// has a leaf in front: eviction is O(1) and leaves go before what they hang on.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "control_plane/core/block_pool.hpp"
#include "control_plane/core/huge_pages.hpp"
#include "control_plane/core/run_arena.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

struct Sequence;

using NodeId = Id<struct NodeTag, uint32_t>;
inline constexpr NodeId kRootNode{0};

// What the KV depends on beside the tokens (a cache salt, an adapter, media): a digest made by the facade, which keeps
// the kinds apart. All zero: nothing.
using Namespace = std::array<uint64_t, 4>;

// The longest prefix the tree knows.
struct Match {
  NodeId node = kRootNode;  // where it ends
  BlockCount within;        // so many blocks of that node's run belong to it: all of them, or fewer
  BlockCount blocks;        // whole blocks, from the beginning
  // A block that continues it and agrees in its first `partial` tokens only: worth a copy.
  NodeId partial_node = kRootNode;
  BlockId partial_block{0};
  TokenCount partial;
};

class PrefixTree {
 public:
  // Blocks come from `pool` and go back to it. For tests: `hash_mask` cripples the hash, `slots` makes memory for runs
  // short (0: plenty).
  PrefixTree(BlockPool& pool, TokenCount block_size, uint64_t seed, uint64_t hash_mask = ~uint64_t{0},
             uint32_t slots = 0);

  BlockCount live() const { return live_; }
  BlockCount cooling() const { return held_ - live_; }
  BlockCount cached() const { return total_ - held_; }
  BlockCount total() const { return total_; }

  // Looks up, and changes nothing. A partial block is offered only if the steps before `now` filled it: copies come
  // before the KV a step writes.
  Match match(const Namespace& key, std::span<const int32_t> tokens, StepSeq now) const;

  // Asks for the memory that match() begins with. `block`: the first of the tokens.
  void prefetch_match(const Namespace& key, const int32_t* block) const {
    __builtin_prefetch(&table_[hash_of(kRootNode.value, key, block) & (table_.size() - 1)]);
  }

  // Pins what matched, and writes its block ids to `blocks`; the node that now ends where the match does.
  NodeId pin(const Match& match, BlockId* blocks);
  // Pins the first `blocks` blocks of a path that is pinned: it is `path` blocks long and ends at `end`. Also of a path
  // that reset() has forgotten.
  NodeId pin_part(NodeId end, BlockCount path, BlockCount blocks);
  // One more pin on a node that is pinned.
  void pin_again(NodeId node) { add_pin(node); }
  // A pin goes; what it held may be read by steps until thaw(), called once for every cool().
  void cool(NodeId node);
  void thaw(NodeId node);

  struct Appended {
    NodeId node;  // where the pin is now
    BlockCount blocks;
  };
  // Blocks [from, to) of a sequence, whose first `from` blocks are the path to `node` and pinned there, filled by step
  // `now`. The tree takes them (the caller gives up its reference) and moves the pin to where they end; it takes none
  // if somebody else's blocks with the same tokens are there already, and less than all if it runs out of memory.
  Appended append(NodeId node, const Namespace& key, const int32_t* tokens, const BlockId* blocks, BlockCount from,
                  BlockCount to, StepSeq now);

  // Of the least recently used run, as many blocks as that has, `most` at most, go back to the pool: how many. cached()
  // must not be 0.
  BlockCount evict(BlockCount most);

  // Forgets everything: cached blocks go back to the pool; those in use do when they are let go of, and are never
  // matched again.
  void reset();

  // Blocks that pinning the match would take out of the cached ones.
  BlockCount cached_on(const Match& match) const;
  // Blocks that are live only because of one pin on `node`.
  BlockCount held_alone(NodeId node) const;
  bool is_stale(NodeId node) const { return nodes_[node.value].is_stale; }

  // Who is computing the tokens that follow `node`; null if nobody is known to.
  Sequence* filler(NodeId node) const { return nodes_[node.value].filler; }
  void set_filler(NodeId node, Sequence* sequence) { nodes_[node.value].filler = sequence; }

  // For tests: every node's blocks, and whether it is live, cooling or cached; the first contradiction found, or "".
  std::string check(const std::function<void(BlockId)>& visit) const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Node {
    uint32_t parent = kNone;
    uint32_t first_child = kNone, next_sibling = kNone, previous_sibling = kNone;
    Extent extent;
    uint32_t begin = 0;  // of the run in its extent
    uint32_t size = 0;   // blocks
    uint32_t pins = 0;
    uint32_t cooling = 0;
    uint32_t live_children = 0;
    uint32_t held_children = 0;
    uint32_t older = kNone, newer = kNone;  // in the list of cached nodes
    bool is_stale = false;                  // forgotten by reset(): not in the table
    uint64_t hash = 0;
    StepSeq filled;              // the last step that filled one of its blocks
    Sequence* filler = nullptr;  // see filler()
    Namespace key{};             // of children of the root

    uint32_t slot() const { return extent.slot + begin; }
    bool is_live() const { return pins + live_children != 0; }
    bool is_held() const { return pins + cooling + held_children != 0; }
  };

  struct Entry {
    uint64_t hash;
    uint32_t node = kNone;
  };

  uint64_t hash_of(uint32_t parent, const Namespace& key, const int32_t* block) const;
  uint32_t find_child(uint32_t parent, const Namespace& key, const int32_t* block, uint64_t hash) const;
  void find_partial(uint32_t parent, const Namespace& key, std::span<const int32_t> rest, StepSeq now,
                    Match& match) const;
  void offer_partial(uint32_t node, uint32_t at, std::span<const int32_t> rest, StepSeq now, Match& match) const;
  uint32_t common_blocks(const Node& node, const int32_t* tokens, uint32_t most) const;
  uint32_t split(uint32_t node, uint32_t at);
  uint32_t make_node(uint32_t parent, const Namespace& key, uint64_t hash, const int32_t* tokens, const BlockId* blocks,
                     uint32_t count);
  void shrink(Node& node) { arena_.shrink(node.extent, node.begin, node.size); }
  bool move_run(Node& node, uint32_t capacity);
  bool extend(Node& node, const int32_t* tokens, const BlockId* blocks, uint32_t count);
  void remove(uint32_t node);
  void prefetch_eviction() const;
  void drop_blocks(Node& node, uint32_t count);
  void write_run(const Node& node, uint32_t at, const int32_t* tokens, const BlockId* blocks, uint32_t count);

  void add_pin(NodeId node);
  void live_up(uint32_t node);
  void live_down(uint32_t node);
  void held_up(uint32_t node);
  void held_down(uint32_t node);

  void adopt_child(uint32_t parent, uint32_t child);
  void orphan(uint32_t child);
  void list_push(uint32_t node);
  void list_remove(uint32_t node);
  void list_insert_after(uint32_t node, uint32_t before);
  void table_insert(uint32_t node);
  void table_erase(uint32_t node);

  BlockPool& pool_;
  const uint32_t block_size_;
  const uint64_t seed_;
  const uint64_t hash_mask_;
  RunArena arena_;
  HugePageVector<Node> nodes_;
  std::vector<uint32_t> free_nodes_;
  HugePageVector<Entry> table_;  // open addressing, linear probing, at most half full
  uint32_t oldest_ = kNone, newest_ = kNone;
  BlockCount live_, held_, total_;
};

}  // namespace twinplane::core
