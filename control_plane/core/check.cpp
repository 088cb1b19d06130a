// Every redundancy of the scheduler's state, recomputed from its owners. For tests: slow and allocating.
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "control_plane/core/group.hpp"
#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {
namespace {

// Collects the first difference.
class Checker {
 public:
  template <typename... Parts>
  void expect(bool holds, const Parts&... parts) {
    if (holds || !first_.empty()) return;
    std::ostringstream text;
    (text << ... << parts);
    first_ = text.str();
  }
  template <typename A, typename B>
  void equal(const A& found, const B& expected, const char* what) {
    expect(found == expected, what, " is ", found, ", its owners give ", expected);
  }
  std::string result() const { return first_; }

 private:
  std::string first_;
};

// INV-5: each block is in exactly one state, and its references are those of its owners.
void check_blocks(Checker& check, const Session& session, const SequenceTable& sequences) {
  const BlockPool& pool = session.blocks.pool();
  std::vector<uint32_t> owners(pool.total().value, 0);
  sequences.for_each([&](const Sequence& s) {
    for (uint32_t i = s.first_own_block().value; i < s.num_blocks.value; ++i) ++owners[s.blocks[i].value];
    if (s.has_copy_source && s.copy_node == kRootNode) ++owners[s.copy_source.value];
  });
  std::vector<uint32_t> places(pool.total().value, 0);
  for (uint32_t b = 0; b < pool.total().value; ++b) {
    check.expect(owners[b] == pool.references({b}), "block ", b, " counts ", pool.references({b}), " references, has ",
                 owners[b], " owners");
    places[b] = owners[b] != 0;
  }
  std::vector<bool> in_tree(pool.total().value, false);
  const std::string tree = session.blocks.tree().check([&](BlockId block) {
    ++places[block.value];
    in_tree[block.value] = true;
  });
  check.expect(tree.empty(), "the prefix tree: ", tree);
  sequences.for_each([&](const Sequence& s) {
    for (uint32_t i = 0; i < s.tree_blocks.value; ++i) {
      check.expect(in_tree[s.blocks[i].value], "request ", s.id.value, " counts on block ", s.blocks[i].value,
                   ", which left the tree");
    }
  });
  for (const BlockId block : pool.free_blocks()) ++places[block.value];
  pool.fenced_blocks().for_each([&](BlockId block) { ++places[block.value]; });
  for (uint32_t b = 0; b < pool.total().value; ++b) {
    check.expect(places[b] == 1, "block ", b, " is in ", places[b],
                 " of the states free, fenced, referenced, in the tree");
  }
}

void check_host(Checker& check, const HostPool& host, const SequenceTable& sequences) {
  BlockCount held;
  sequences.for_each([&](const Sequence& s) { held += s.num_saved; });
  check.equal((host.free() + host.fenced() + held).value, host.total().value, "free + fenced + held host blocks");
}

void check_rows(Checker& check, const Session& session, const Line& running) {
  const Rows& rows = session.rows;
  uint32_t free = 0;
  for (uint32_t r = 0; r < rows.size(); ++r) {
    const Sequence* const owner = rows.owner({r});
    free += rows.is_free({r});
    check.expect(owner == nullptr || owner->row == RowId{r}, "row ", r, " has an owner that does not name it");
    check.expect(owner == nullptr || !rows.is_free({r}), "row ", r, " is free and owned");
  }
  for (size_t i = 0; i < running.size(); ++i) {
    const Sequence& s = running[i];
    check.expect(s.row != kNoRow && rows.owner(s.row) == &s, "request ", s.id.value, " runs without its row");
  }
  check.equal(rows.num_free(), free, "free rows");
  check.equal(rows.num_free() + rows.num_fenced() + running.size(), rows.size(), "free + fenced + seated rows");
}

void check_line(Checker& check, const Line& line, SequenceState state, const char* name) {
  for (size_t i = 0; i < line.size(); ++i) {
    check.expect(line[i].state == state, "request ", line[i].id.value, " is in the ", name, " line in another state");
    check.expect(i == 0 || line[i - 1].precedes(line[i]), "the ", name, " line is out of order at ", i);
  }
}

void check_shares(Checker& check, const FairShare& shares, const SequenceTable& sequences) {
  std::vector<uint32_t> live(FairShare::kMaxTenants), waiting(FairShare::kMaxTenants);
  sequences.for_each([&](const Sequence& s) {
    ++live[s.tenant.value];
    waiting[s.tenant.value] += !s.was_resident;
    check.expect(s.was_resident == s.is_by_line(), "request ", s.id.value, " is at a newcomer's place or none");
  });
  size_t with_newcomers = 0;
  for (uint16_t i = 0; i < FairShare::kMaxTenants; ++i) {
    check.equal(shares.num_live({i}), live[i], "live requests of a tenant");
    check.equal(shares.num_waiting({i}), waiting[i], "newcomers of a tenant");
    with_newcomers += waiting[i] != 0;
  }
  check.equal(shares.turns().size(), with_newcomers, "tenants in the heap of turns");
  for (size_t i = 1; i < shares.turns().size(); ++i) {
    check.expect(!(shares.turns()[i] < shares.turns()[(i - 1) / 2]), "the heap of turns is out of order at ", i);
  }
}

void check_sequence(Checker& check, const Sequence& s, const std::optional<Session>& session) {
  const uint64_t id = s.id.value;
  check.expect(s.num_computed <= s.known(), "request ", id, " computed more than it knows");
  check.expect(s.known() <= s.limit, "request ", id, " goes past its limit");
  const bool is_beam = s.has_group && s.group->beams != nullptr;
  check.expect(is_beam || s.emitted().value == s.published.load(), "request ", id, " has unpublished tokens");
  check.expect(s.is_swapped() || s.num_saved == BlockCount{0}, "request ", id, " saved blocks of no tokens");
  if (s.state == SequenceState::kWaiting) {
    check.expect(s.num_blocks == BlockCount{0} && s.node == kRootNode, "request ", id, " waits and holds blocks");
    check.expect(s.num_computed == TokenCount{0}, "request ", id, " waits and has computed tokens");
    check.expect(s.num_pending == TokenCount{0} || s.row != kNoRow, "request ", id, " waits for a token from no row");
    return;
  }
  if (!session) return check.expect(false, "request ", id, " runs without a session");
  // A pending token is the last known one: the step that samples it computes everything before.
  const TokenCount computed = s.known() - TokenCount{1};
  check.expect(s.num_pending == TokenCount{0} || s.num_computed == computed, "request ", id, " has a pending token at ",
               computed.value, ", computed are ", s.num_computed.value);
  check.expect(s.num_pending.value <= session->in_flight().value, "request ", id,
               " has more pending tokens than steps");
  if (s.is_following) {
    check.expect(s.num_computed == TokenCount{0}, "request ", id, " follows and has computed tokens");
    return;
  }
  check.expect(blocks_for(s.num_computed, session->pool.block_size) <= s.num_blocks, "request ", id,
               " computed tokens without blocks");
}

}  // namespace

std::string Scheduler::check() const {
  Checker check;
  const auto& [sequences, deadlines, waiting, running] = population_;
  check_line(check, waiting, SequenceState::kWaiting, "waiting");
  check_line(check, running, SequenceState::kRunning, "running");
  check.equal(waiting.size() + running.size(), sequences.size(), "waiting + running requests");
  size_t with_deadline = 0;
  sequences.for_each([&](const Sequence& s) {
    with_deadline += s.deadline() != Nanos{0};
    check_sequence(check, s, session_);
  });
  check.equal(deadlines.size(), with_deadline, "members of the deadline heap");
  if (shares_) check_shares(check, *shares_, sequences);
  if (session_) {
    check_blocks(check, *session_, sequences);
    check_rows(check, *session_, running);
    check_host(check, session_->host, sequences);
    check.expect(session_->in_flight() <= StepSeq{config_.depth}, session_->in_flight().value, " steps in flight");
  }
  return check.result();
}

}  // namespace twinplane::core
