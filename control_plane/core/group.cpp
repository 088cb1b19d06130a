#include "control_plane/core/group.hpp"

#include <utility>

namespace twinplane::core {

std::unique_ptr<Sequence> make_request(RequestId id, std::span<const int32_t> prompt, RequestParams params,
                                       TokenCount block_size, Nanos now) {
  const uint32_t count = params.num_sequences();
  if (count == 1) return Sequence::make(id, prompt, std::move(params), block_size, now);
  auto group = std::make_shared<Group>();
  const uint32_t first_stream = params.sampling.stream;
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (uint32_t i = 0; i < count; ++i) {
    params.sampling.stream = first_stream + i;
    sequences.push_back(Sequence::make(RequestId{id.value + i}, prompt, params, block_size, now));
    Sequence& sequence = *sequences.back();
    sequence.group = group;
    sequence.has_group = true;
    sequence.index = i;
    group->members.push_back(&sequence);
  }
  if (params.beams.width > 1) {
    const size_t stops = sequences[0]->stops.size();
    group->beams = std::make_unique<BeamSearch>(params.beams, stops, params.max_tokens);
    for (const auto& sequence : sequences) sequence->num_candidates = group->beams->candidates_per_beam();
  }
  std::unique_ptr<Sequence> first = std::move(sequences.front());
  sequences.erase(sequences.begin());
  group->newcomers = std::move(sequences);
  return first;
}

}  // namespace twinplane::core
