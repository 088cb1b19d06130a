// The prefix tree against a map from whole prefixes to blocks, under random histories: what is found, what is evicted
// and when. Usage: prefix_tree_fuzz FIRST_SEED SEEDS HASH_BITS SLOTS (0 bits: every hash collides; slots: memory for
// runs, in blocks, 0: plenty).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "control_plane/core/prefix_tree.hpp"

namespace twinplane::core {
namespace {

constexpr uint32_t kBlockSize = 4;
constexpr uint32_t kBlocks = 48;

using Prefix = std::pair<Namespace, std::vector<int32_t>>;

void require(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "wrong: %s\n", what), std::abort();
}

struct Holder {
  Prefix tokens;
  std::vector<BlockId> blocks;
  NodeId node{0};
  uint32_t tree_blocks = 0;
};

class Fuzz {
 public:
  Fuzz(uint32_t seed, uint64_t mask, uint32_t slots)
      : dice_(seed), pool_({kBlocks}), tree_(pool_, {kBlockSize}, seed, mask, slots), is_tight_(slots != 0) {}

  void run(int moves) {
    for (int i = 0; i < moves; ++i) {
      ++step_.value;
      switch (roll(10)) {
        case 0:
        case 1:
        case 2:
        case 3:
          begin();
          break;
        case 4:
        case 5:
          grow();
          break;
        case 6:
        case 7:
          leave();
          break;
        case 8:
          thaw();
          break;
        default:
          if (roll(40) == 0) reset();
      }
      check();
    }
    while (!holders_.empty()) leave();
    while (!cooling_.empty()) thaw();
    check();
    require(tree_.cached() == tree_.total(), "at rest everything is cached");
    while (tree_.total().value != 0) evict();
    require(pool_.free().value == kBlocks, "all blocks come back");
  }

 private:
  uint32_t roll(uint32_t sides) { return static_cast<uint32_t>(dice_() % sides); }

  Prefix random_tokens() {
    // Few tokens, so that prefixes are shared and collide.
    Prefix prefix;
    prefix.first[roll(4)] = roll(2);
    prefix.second.resize(roll(10 * kBlockSize) + 1);
    for (auto& token : prefix.second) token = static_cast<int32_t>(roll(8) == 0 ? roll(3) : 0);
    return prefix;
  }

  Prefix cut(const Prefix& prefix, uint32_t blocks) const {
    return {prefix.first, {prefix.second.begin(), prefix.second.begin() + blocks * kBlockSize}};
  }

  uint32_t expected_blocks(const Prefix& prefix) const {
    uint32_t blocks = 0;
    while ((blocks + 1) * kBlockSize <= prefix.second.size() && known_.contains(cut(prefix, blocks + 1))) ++blocks;
    return blocks;
  }

  void begin() {
    if (holders_.size() == 6) return;
    Holder holder{.tokens = random_tokens(), .blocks = std::vector<BlockId>(kBlocks)};
    const Match match = tree_.match(holder.tokens.first, holder.tokens.second, step_);
    require(match.blocks.value == expected_blocks(holder.tokens), "the longest match");
    check_partial(holder.tokens, match);
    const BlockCount cached = tree_.cached();
    Match whole = match;
    whole.partial = {0};
    const BlockCount taken = tree_.cached_on(whole);
    holder.node = tree_.pin(match, holder.blocks.data());
    const BlockCount blocks = match.blocks;
    require(tree_.cached() == cached - taken, "cached_on tells what pinning takes");
    for (uint32_t i = 0; i < blocks.value; ++i) {
      require(known_.at(cut(holder.tokens, i + 1)) == holder.blocks[i].value, "the match names the right blocks");
    }
    holder.tree_blocks = blocks.value;
    holders_.push_back(std::move(holder));
  }

  void check_partial(const Prefix& prefix, const Match& match) {
    if (match.partial.value == 0) return;
    // The block offered continues the match with that many equal tokens.
    for (const auto& [known, block] : known_) {
      if (block != match.partial_block.value) continue;
      require(known.first == prefix.first, "the partial block is of the same namespace");
      require(known.second.size() == (match.blocks.value + 1) * kBlockSize, "the partial block continues the match");
      const size_t equal = match.blocks.value * kBlockSize + match.partial.value;
      require(std::equal(known.second.begin(), known.second.begin() + static_cast<long>(equal), prefix.second.begin()),
              "the partial block agrees as far as it says");
      return;
    }
    require(false, "the partial block is known");
  }

  void grow() {
    if (holders_.empty()) return;
    Holder& holder = holders_[roll(static_cast<uint32_t>(holders_.size()))];
    const uint32_t full = static_cast<uint32_t>(holder.tokens.second.size()) / kBlockSize;
    if (holder.tree_blocks == full) return;
    const uint32_t to = holder.tree_blocks + 1 + roll(full - holder.tree_blocks);
    const uint32_t from = holder.tree_blocks;
    for (uint32_t i = from; i < to; ++i) {
      while (pool_.free().value == 0) {
        if (tree_.cached().value == 0) {
          for (uint32_t j = from; j < i; ++j) pool_.release(holder.blocks[j], {0});
          return;
        }
        evict();
      }
      holder.blocks[i] = pool_.acquire();
    }
    const bool is_known = known_.contains(cut(holder.tokens, from + 1));
    const bool is_stale = tree_.is_stale(holder.node);
    const auto [node, taken] = tree_.append(holder.node, holder.tokens.first, holder.tokens.second.data(),
                                            holder.blocks.data(), {from}, {to}, step_);
    if (is_known || is_stale) {
      require(taken.value == from, "append takes none that are there already");
    } else {
      require(taken.value == to || (is_tight_ && taken.value >= from), "append takes all, if there is memory for runs");
    }
    for (uint32_t i = from; i < taken.value; ++i) {
      pool_.hand_over(holder.blocks[i]);
      known_[cut(holder.tokens, i + 1)] = holder.blocks[i].value;
    }
    for (uint32_t i = taken.value; i < to; ++i) pool_.release(holder.blocks[i], {0});
    holder.node = node;
    holder.tree_blocks = taken.value;
  }

  void leave() {
    if (holders_.empty()) return;
    const auto at = holders_.begin() + roll(static_cast<uint32_t>(holders_.size()));
    tree_.cool(at->node);
    cooling_.push_back(at->node);
    held_later_.push_back(*at);
    holders_.erase(at);
    if (roll(2) == 0) thaw();
  }

  void thaw() {
    if (cooling_.empty()) return;
    tree_.thaw(cooling_.front());
    cooling_.erase(cooling_.begin());
    held_later_.erase(held_later_.begin());
  }

  void evict() {
    const size_t before = pool_.free_blocks().size();
    const BlockCount most{1 + roll(3)};
    const BlockCount evicted = tree_.evict(most);
    require(evicted.value != 0 && evicted <= most, "some blocks go, and no more than asked for");
    require(pool_.free_blocks().size() == before + evicted.value, "as many come back");
    for (size_t i = before; i < pool_.free_blocks().size(); ++i) forget(pool_.free_blocks()[i].value);
  }

  // The block was evicted.
  void forget(uint32_t block) {
    for (auto it = known_.begin(); it != known_.end(); ++it) {
      if (it->second != block) continue;
      const Prefix gone = it->first;
      known_.erase(it);
      for (const auto& [other, b] : known_) {
        require(other.first != gone.first || other.second.size() <= gone.second.size() ||
                    !std::equal(gone.second.begin(), gone.second.end(), other.second.begin()),
                "an end goes before its beginning");
      }
      return;
    }
    require(false, "the evicted block was known");
  }

  void reset() {
    tree_.reset();
    known_.clear();
    require(tree_.cached().value == 0, "nothing is cached after a reset");
  }

  void check() {
    std::vector<bool> seen(kBlocks, false);
    const std::string wrong = tree_.check([&](BlockId block) {
      require(!seen[block.value], "a block is in the tree once");
      seen[block.value] = true;
    });
    if (!wrong.empty()) std::fprintf(stderr, "wrong: %s\n", wrong.c_str()), std::abort();
    require(tree_.total().value + pool_.free().value == kBlocks, "no block is lost");
    for (const auto* list : {&holders_, &held_later_}) {
      for (const Holder& holder : *list) {
        for (uint32_t i = 0; i < holder.tree_blocks; ++i) require(seen[holder.blocks[i].value], "held blocks stay");
      }
    }
  }

  std::mt19937 dice_;
  BlockPool pool_;
  PrefixTree tree_;
  const bool is_tight_;
  StepSeq step_;
  std::map<Prefix, uint32_t> known_;
  std::vector<Holder> holders_, held_later_;
  std::vector<NodeId> cooling_;
};

}  // namespace
}  // namespace twinplane::core

int main(int argc, char** argv) {
  if (argc != 5) return std::fprintf(stderr, "usage: %s FIRST_SEED SEEDS HASH_BITS SLOTS\n", argv[0]), 2;
  const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
  const uint64_t mask = number(3) >= 64 ? ~uint64_t{0} : (uint64_t{1} << number(3)) - 1;
  for (uint32_t seed = number(1); seed < number(1) + number(2); ++seed)
    twinplane::core::Fuzz(seed, mask, number(4)).run(3000);
}
