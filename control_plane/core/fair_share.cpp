#include "control_plane/core/fair_share.hpp"

#include <algorithm>
#include <cassert>
#include <functional>

namespace twinplane::core {
namespace {

// Fine enough that the greatest weight divides it without much loss, coarse enough for 2^40 tokens.
constexpr uint64_t kScale = 1ull << 20;

}  // namespace

FairShare::FairShare(const Config& config) : config_(config), tenants_(kMaxTenants) {
  turns_.reserve(kMaxTenants);
  tenants_[kOthers.value].unit = kScale;
}

TenantId FairShare::enter(std::string_view name) {
  name = name.substr(0, kMaxTenantName);
  const uint64_t hash = std::hash<std::string_view>{}(name);
  TenantId tenant = find(name, hash);
  if (tenant == kOthers) {
    tenant = free_seat();
    if (tenant != kOthers) {
      Tenant& seat = tenants_[tenant.value];
      seat = {.unit = unit_of(name), .length = static_cast<uint8_t>(name.size())};
      std::ranges::copy(name, seat.name.begin());
      hashes_[tenant.value] = hash;
    }
  }
  ++tenants_[tenant.value].live;
  return tenant;
}

void FairShare::leave(TenantId tenant) { --tenants_[tenant.value].live; }

TenantId FairShare::find(std::string_view wanted, uint64_t hash) const {
  for (uint16_t i = 1; i < kMaxTenants; ++i) {
    if (hashes_[i] == hash && tenants_[i].unit != 0 && name({i}) == wanted) return {i};
  }
  return kOthers;
}

// A seat never taken, or one whose tenant has no request and less service than the level: it would be lifted to that on
// its return, so forgetting it changes nothing.
TenantId FairShare::free_seat() {
  for (uint16_t i = 1; i < kMaxTenants; ++i) {
    const Tenant& seat = tenants_[i];
    if (seat.unit == 0 || (seat.live == 0 && seat.service <= level())) return {i};
  }
  return kOthers;
}

uint64_t FairShare::unit_of(std::string_view name) const {
  for (const auto& [tenant, weight] : config_.tenant_weights) {
    if (tenant == name) return std::max<uint64_t>(kScale / weight, 1);
  }
  return kScale;
}

void FairShare::wait(TenantId tenant) {
  Tenant& one = tenants_[tenant.value];
  if (one.waiting++ != 0) return;
  one.service = std::max(one.service, level());
  turns_.push_back({one.service, tenant});
  sift_up(turns_.size() - 1);
}

void FairShare::unwait(TenantId tenant) {
  Tenant& one = tenants_[tenant.value];
  assert(one.waiting != 0);
  if (--one.waiting != 0) return;
  const size_t place = one.place;
  one.place = kNoPlace;
  const Turn last = turns_.back();
  turns_.pop_back();
  if (turns_.empty()) last_level_ = std::max(last_level_, one.service);
  if (last.tenant == tenant) return;
  put(place, last);
  sift_down(place);
  sift_up(tenants_[last.tenant.value].place);
}

void FairShare::charge(TenantId tenant, uint64_t tokens) {
  Tenant& one = tenants_[tenant.value];
  one.service += tokens * one.unit;
  if (one.place == kNoPlace) return;
  turns_[one.place].service = one.service;
  sift_down(one.place);
}

double FairShare::service(TenantId tenant) const {
  return static_cast<double>(tenants_[tenant.value].service) / static_cast<double>(kScale);
}

std::string_view FairShare::name(TenantId tenant) const {
  const Tenant& one = tenants_[tenant.value];
  return {one.name.data(), one.length};
}

void FairShare::put(size_t place, Turn turn) {
  turns_[place] = turn;
  tenants_[turn.tenant.value].place = static_cast<uint32_t>(place);
}

void FairShare::sift_up(size_t place) {
  const Turn turn = turns_[place];
  for (; place != 0 && turn < turns_[(place - 1) / 2]; place = (place - 1) / 2) put(place, turns_[(place - 1) / 2]);
  put(place, turn);
}

void FairShare::sift_down(size_t place) {
  const Turn turn = turns_[place];
  for (size_t child = 2 * place + 1; child < turns_.size(); child = 2 * place + 1) {
    if (child + 1 < turns_.size() && turns_[child + 1] < turns_[child]) ++child;
    if (!(turns_[child] < turn)) break;
    put(place, turns_[child]);
    place = child;
  }
  put(place, turn);
}

}  // namespace twinplane::core
