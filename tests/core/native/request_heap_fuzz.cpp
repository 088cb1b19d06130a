// The heap for requests under random histories: pieces never overlap, and what was freed is used again. Usage:
// request_heap_fuzz FIRST_SEED SEEDS
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "control_plane/core/request_heap.hpp"

namespace twinplane::core {
namespace {

void require(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "wrong: %s\n", what), std::abort();
}

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : dice_(seed) {}

  void run() {
    constexpr int kMoves = 3000;
    for (int i = 0; i < kMoves; ++i) {
      if (pieces_.empty() || dice_() % 5 < 3) {
        take(1 + dice_() % (dice_() % 2 == 0 ? RequestHeap::kLongestPiece : 4096));
      } else {
        give_back(dice_() % pieces_.size());
      }
    }
    // The same once more, in another order: all of it is there already.
    std::vector<size_t> sizes;
    for (const Piece& piece : pieces_) sizes.push_back(piece.bytes);
    while (!pieces_.empty()) give_back(dice_() % pieces_.size());
    std::shuffle(sizes.begin(), sizes.end(), dice_);
    const size_t mapped = heap_.mapped_bytes();
    for (const size_t bytes : sizes) take(bytes);
    require(heap_.mapped_bytes() == mapped, "what was freed is used again");
    while (!pieces_.empty()) give_back(0);
  }

 private:
  // Filled with a number of its own, so that whoever writes into it is noticed.
  struct Piece {
    unsigned char* at;
    size_t bytes;
    unsigned char content;
  };

  void take(size_t bytes) {
    const Piece piece{static_cast<unsigned char*>(heap_.allocate(bytes)), bytes, static_cast<unsigned char>(dice_())};
    require(reinterpret_cast<uintptr_t>(piece.at) % RequestHeap::kLineBytes == 0, "a piece begins with a cache line");
    std::memset(piece.at, piece.content, bytes);
    pieces_.push_back(piece);
  }

  void give_back(size_t i) {
    const Piece piece = pieces_[i];
    pieces_[i] = pieces_.back();
    pieces_.pop_back();
    for (size_t at = 0; at < piece.bytes; ++at) require(piece.at[at] == piece.content, "nobody else has the piece");
    heap_.free(piece.at, piece.bytes);
  }

  std::mt19937 dice_;
  RequestHeap heap_;
  std::vector<Piece> pieces_;
};

}  // namespace
}  // namespace twinplane::core

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s FIRST_SEED SEEDS\n", argv[0]), 2;
  const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)); };
  for (uint32_t seed = number(1); seed < number(1) + number(2); ++seed) twinplane::core::Fuzz(seed).run();
}
