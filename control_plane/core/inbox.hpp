// A lock-free queue of many producers and one consumer over nodes that carry their own link.
#pragma once

#include <atomic>

namespace twinplane::core {

// A stack that producers push onto and that the consumer takes whole and turns round. Since nobody ever pops a single
// node, there is no ABA; since a push is one compare-and-swap, there is no moment in which the queue looks broken.
//
//   producer                                        consumer
//     write the nodes, link them
//     compare-exchange head        release  [Q1]      exchange head with null   acquire  [Q2]
//
// [Q1] pairs with [Q2]: who takes a node sees what its producer wrote before pushing it. Later pushes continue the
// release sequence of earlier ones, so one exchange acquires them all.
template <typename Node, Node* Node::* kNext>
class Inbox {
 public:
  // True if nothing was waiting: only then does the consumer have to be told, because whoever made the queue non-empty
  // has told it or is about to.
  bool push(Node* node) { return push_chain(node, node); }

  // Nodes linked `newest` -> ... -> `oldest`, in one go.
  bool push_chain(Node* newest, Node* oldest) {
    Node* head = head_.load(std::memory_order_relaxed);
    do {
      oldest->*kNext = head;
    } while (!head_.compare_exchange_weak(head, newest, std::memory_order_release, std::memory_order_relaxed));  // [Q1]
    return head == nullptr;
  }

  bool empty() const { return head_.load(std::memory_order_acquire) == nullptr; }

  // Everything pushed so far, oldest first, linked by kNext; null if there is nothing.
  Node* take_all() {
    Node* node = head_.exchange(nullptr, std::memory_order_acquire);  // [Q2]
    Node* oldest_first = nullptr;
    while (node != nullptr) {
      Node* const older = node->*kNext;
      node->*kNext = oldest_first;
      oldest_first = node;
      node = older;
    }
    return oldest_first;
  }

 private:
  std::atomic<Node*> head_{nullptr};
};

}  // namespace twinplane::core
