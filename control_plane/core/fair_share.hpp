// Fair share between tenants: who has been served least comes in next. The Virtual Token Counter of Sheng et al.,
// "Fairness in Serving Large Language Models" (OSDI 2024, sec. 4), with weights.
//
// A tenant's service is prompt tokens computed + kOutputWeight x tokens emitted, divided by its weight. Prompts count
// when they are admitted, output as it is emitted, recomputation not at all. A tenant whose first request begins to
// wait is lifted to the least served of those that wait, so being idle earns nothing.
//
// Only newcomers wait for a turn. Who has been resident keeps its place ahead of all of them (INV-7), and is nobody's
// turn: its prompt has been paid for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "control_plane/core/config.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

class FairShare {
 public:
  // Tenants known at once. Those beyond share one seat, and so one share.
  static constexpr size_t kMaxTenants = 256;
  static constexpr TenantId kOthers{0};
  static constexpr uint64_t kOutputWeight = 2;

  // A tenant that has newcomers waiting, in the order of turns.
  struct Turn {
    uint64_t service;
    TenantId tenant;

    // Of equally served ones the lower seat: any rule does, but it has to be one.
    friend bool operator<(const Turn& a, const Turn& b) {
      return a.service != b.service ? a.service < b.service : a.tenant < b.tenant;
    }
  };

  explicit FairShare(const Config& config);

  // A request of this tenant came in; its seat. The name is copied, up to kMaxTenantName characters.
  TenantId enter(std::string_view name);
  // That request has ended.
  void leave(TenantId tenant);

  // A newcomer of the tenant waits; it no longer does.
  void wait(TenantId tenant);
  void unwait(TenantId tenant);

  // It got so much.
  void charge_prompt(TenantId tenant, TokenCount tokens) { charge(tenant, tokens.value); }
  void charge_output(TenantId tenant) { charge(tenant, kOutputWeight); }

  // Those with newcomers waiting: a heap, the least served one first.
  const std::vector<Turn>& turns() const { return turns_; }

  uint64_t virtual_service(TenantId tenant) const { return tenants_[tenant.value].service; }

  // Service of a tenant in tokens x weight^-1, for tests and diagnosis.
  double service(TenantId tenant) const;
  std::string_view name(TenantId tenant) const;
  uint32_t num_waiting(TenantId tenant) const { return tenants_[tenant.value].waiting; }
  uint32_t num_live(TenantId tenant) const { return tenants_[tenant.value].live; }

 private:
  static constexpr uint32_t kNoPlace = ~uint32_t{0};

  struct Tenant {
    uint64_t service = 0;       // virtual: in kScale-ths of a token, divided by the weight
    uint64_t unit = 0;          // what one token adds; 0: the seat is free
    uint32_t live = 0;          // requests
    uint32_t waiting = 0;       // of these, newcomers that wait
    uint32_t place = kNoPlace;  // in the heap of turns
    uint8_t length = 0;
    std::array<char, kMaxTenantName> name{};
  };

  void charge(TenantId tenant, uint64_t tokens);
  // Below this, a tenant that begins to wait is lifted anyway.
  uint64_t level() const { return turns_.empty() ? last_level_ : turns_.front().service; }
  TenantId find(std::string_view name, uint64_t hash) const;
  TenantId free_seat();
  uint64_t unit_of(std::string_view name) const;
  void put(size_t place, Turn turn);
  void sift_up(size_t place);
  void sift_down(size_t place);

  const Config& config_;
  std::vector<Tenant> tenants_;
  std::array<uint64_t, kMaxTenants> hashes_{};  // of the names; apart, so that looking for one reads little memory
  std::vector<Turn> turns_;
  uint64_t last_level_ = 0;  // the level when nobody waited any more
};

}  // namespace twinplane::core
