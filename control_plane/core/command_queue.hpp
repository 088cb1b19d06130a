// Commands from any thread to the core's thread, and the way back of their memory.
#pragma once

#include <memory>

#include "control_plane/core/inbox.hpp"
#include "control_plane/core/request.hpp"

namespace twinplane::core {

struct Command {
  RequestId id{0};
  std::unique_ptr<Sequence> sequence;  // to be accepted; null: the request `id` is to be cancelled
  Command* next = nullptr;
};

// The core neither allocates nor frees (INV-11): it gives commands back, and the next caller frees them.
class CommandQueue {
 public:
  CommandQueue() = default;
  CommandQueue(const CommandQueue&) = delete;
  CommandQueue& operator=(const CommandQueue&) = delete;
  ~CommandQueue() {
    free_all(commands_);
    free_all(spent_);
  }

  // --- any thread; the caller rings the core afterwards ---
  void push(std::unique_ptr<Command> command) { commands_.push(command.release()); }
  void free_spent() { free_all(spent_); }

  // --- the core's thread ---
  bool empty() const { return commands_.empty(); }

  // Everything pushed so far, in order. True if there was anything.
  template <typename Visit>
  bool drain(Visit visit) {
    Command* command = commands_.take_all();
    const bool any = command != nullptr;
    while (command != nullptr) {
      Command* const next = command->next;
      visit(*command);
      spent_.push(command);
      command = next;
    }
    return any;
  }

 private:
  using Queue = Inbox<Command, &Command::next>;

  static void free_all(Queue& queue) {
    for (Command* command = queue.take_all(); command != nullptr;) {
      const std::unique_ptr<Command> owner(command);
      command = owner->next;
    }
  }

  Queue commands_;
  Queue spent_;
};

}  // namespace twinplane::core
