"""The one source of the wire layout between the planes.

Everything both planes read or write in the mapping is declared here: structs (field by field,
with units), flags, and the regions of the segment with their sizes as functions of the session's
capacities. ``python -m twinplane.shared.generate`` turns this file into ``csrc/wire.hpp`` (C++)
and ``wire.py`` (numpy); both are committed, and a test fails when regenerating changes them.

PROTOCOL.md explains the meaning; this file fixes the bytes. All integers are little-endian, every
struct is plain old data with natural alignment and no implicit padding.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_VERSION = 4
MAGIC = 0x454E414C504E5754  # b"TWNPLANE" read as a little-endian u64
PAGE = 4096
CACHE_LINE = 64
NO_TOKEN = -1  # in `token_ids`: "the token this row sampled last" (relay)


@dataclass(frozen=True)
class Field:
    """One member of a struct: C type name, optional array length, what it means."""

    name: str
    type: str  # u32 u64 i32 f32, or the name of a struct declared earlier
    doc: str
    count: int = 1


@dataclass(frozen=True)
class Struct:
    name: str
    doc: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Flags:
    """A set of named constants; ``bits`` are powers of two, ``values`` count from zero."""

    name: str
    doc: str
    values: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Region:
    """``count`` elements of ``type``; ``count`` is an expression over capacity names."""

    name: str
    type: str
    count: str
    doc: str
    align: int = CACHE_LINE


CAPACITIES: tuple[tuple[str, str], ...] = (
    ("ring_depth", "slots in each ring; at least the scheduler's overlap depth, plus one"),
    ("max_rows", "permanent rows, that is, sequences resident on the device at once"),
    ("max_step_tokens", "tokens one step may carry over all its sequences"),
    ("max_table_writes", "block-table writes one step may carry"),
    ("max_copies", "block copies one step may carry"),
    ("max_extra_words", "words of row attachments one step may carry"),
    ("max_results", "result entries one result may carry"),
    ("max_swaps", "blocks one step may move from the device to the host, and as many back"),
    ("max_candidates", "candidate tokens one result may carry over all its entries"),
)

FLAGS: tuple[Flags, ...] = (
    Flags(
        "SeqFlag",
        "How a scheduled sequence takes part in a step.",
        (
            ("SAMPLES", 1, "the step reaches the end of the known tokens: sample a token"),
            ("CHUNK", 2, "a prompt chunk (prefill or recompute), not a decode"),
        ),
    ),
    Flags(
        "RowFlag",
        "Standing properties of a row, fixed when it is opened.",
        (
            ("GREEDY", 1, "argmax of the edited, penalized logits; temperature and filters are ignored"),
            ("LOGPROBS", 2, "return the log-probability and rank of each chosen token"),
        ),
    ),
    Flags(
        "ExtraKind",
        "Kinds of row attachment (see the `extras` region).",
        (
            ("PROMPT_HISTORY", 1, "token ids of the prompt, for repetition penalty"),
            ("OUTPUT_HISTORY", 2, "token ids emitted so far, for all three penalties"),
            ("LOGIT_BIAS", 3, "pairs (token id, float bits) added to the logits"),
            ("ALLOWED_TOKENS", 4, "token ids; every other token is masked out"),
            ("SUPPRESSED_TOKENS", 5, "word 0: first position where they are allowed again; rest: token ids"),
            ("STOP_TOKENS", 6, "word 0: first position where one of them ends the row; rest: token ids"),
        ),
    ),
    Flags(
        "ResultFlag",
        "What is special about a result entry.",
        (("NOT_FINITE", 1, "the row's logits held NaN or were all -inf: `token` is meaningless, the row failed alone"),),
    ),
    Flags(
        "StepStatus",
        "Outcome of a whole step.",
        (
            ("OK", 0, "all entries are valid"),
            ("FAILED", 1, "the step raised; the cause travels over the lifeline and the data plane exits"),
        ),
    ),
    Flags(
        "Phase",
        "Where a plane's loop is; names the culprit when something stalls.",
        (
            ("STARTING", 0, "attached, not serving yet (weights load)"),
            ("IDLE", 1, "waiting for the peer"),
            ("APPLY", 2, "data plane: applying deltas to the rows"),
            ("FORWARD", 3, "data plane: running the model"),
            ("SAMPLE", 4, "data plane: sampling"),
            ("PUBLISH", 5, "writing into a ring"),
            ("PLAN", 6, "control plane: planning a step"),
            ("STOPPED", 7, "left the loop on purpose"),
        ),
    ),
)

STRUCTS: tuple[Struct, ...] = (
    Struct(
        "Header",
        "First bytes of the segment. Written by the control plane before `ready`, constant after.",
        (
            Field("magic", "u64", "MAGIC"),
            Field("layout_hash", "u64", "first 8 bytes of SHA-256 over the schema"),
            Field("layout_version", "u32", "LAYOUT_VERSION, for messages to people"),
            Field("header_bytes", "u32", "sizeof(Header)"),
            Field("segment_bytes", "u64", "size of the whole segment"),
            Field("epoch", "u64", "number of this session; the lifeline's `welcome` names the same"),
            Field("owner_pid", "u64", "pid of the control plane in its own PID namespace"),
            Field("owner_start_time", "u64", "field 22 of /proc/<pid>/stat, clock ticks since boot"),
            Field("capacities", "u32", "the session's capacities, in the order of CAPACITIES", 9),
            Field("ready", "u32", "1 once all of the above is written; stored last with release"),
        ),
    ),
    Struct(
        "PlaneState",
        "What one plane tells the other outside the rings. One writer: the plane it belongs to.",
        (
            Field("published", "u64", "number of slots this plane has published into its outgoing ring"),
            Field("pad0", "u32", "own cache line for `published`", 14),
            Field("consumed", "u64", "number of slots this plane is done with in its incoming ring"),
            Field("pad1", "u32", "own cache line for `consumed`", 14),
            Field("heartbeat_ns", "u64", "CLOCK_MONOTONIC of the last sign of life"),
            Field("phase_since_ns", "u64", "CLOCK_MONOTONIC when the current phase began"),
            Field("phase_step", "u64", "step the current phase is about"),
            Field("interrupted", "u64", "control plane: steps below this number end after the substep under way; only grows"),
            Field("phase", "u32", "Phase"),
            Field("pad2", "u32", "end of the cache line", 7),
        ),
    ),
    Struct(
        "Bell",
        "A futex doorbell. `rings` carries no truth: anyone may add to it; `sleeping` is the waiter's.",
        (
            Field("rings", "u32", "the futex word: fetch_add(1) by whoever rings"),
            Field("pad0", "u32", "own cache line for `rings`", 15),
            Field("sleeping", "u32", "1 while the owner sleeps or is about to; written by the owner alone"),
            Field("pad1", "u32", "end of the cache line", 15),
        ),
    ),
    Struct(
        "StepHeader",
        "Start of a step slot: how much of each region below is in use.",
        (
            Field("step", "u64", "step number; equals the slot's ring sequence number, first is 0"),
            Field("sent_ns", "u64", "CLOCK_MONOTONIC when the control plane published it"),
            Field("num_seqs", "u32", "used entries of `seqs`"),
            Field("num_decodes", "u32", "the first so many of `seqs` are decodes, the rest are chunks"),
            Field("num_tokens", "u32", "used entries of `token_ids`"),
            Field("num_closes", "u32", "used entries of `closes`"),
            Field("num_opens", "u32", "used entries of `opens`"),
            Field("num_forks", "u32", "used entries of `forks`"),
            Field("num_table_writes", "u32", "used entries of `table_writes`"),
            Field("num_swap_outs", "u32", "used entries of `swap_outs`"),
            Field("num_swap_ins", "u32", "used entries of `swap_ins`"),
            Field("num_copies", "u32", "used entries of `copies`"),
            Field("num_extra_words", "u32", "used words of `extras`"),
            Field(
                "num_substeps", "u32", "decode steps the data plane makes of it on its own; at least 1, above 1 all of `seqs` are decodes"
            ),
        ),
    ),
    Struct(
        "SeqEntry",
        "One scheduled sequence of a step.",
        (
            Field("row", "u32", "the sequence's permanent row"),
            Field("position", "u32", "position of its first token of this step (= tokens computed before)"),
            Field("num_tokens", "u32", "tokens of this step; afterwards the context is position + num_tokens"),
            Field("token_start", "u32", "where its tokens begin in `token_ids`"),
            Field("flags", "u32", "SeqFlag"),
            Field("num_drafts", "u32", "of num_tokens, the last so many are draft tokens (speculation)"),
        ),
    ),
    Struct(
        "RowOpen",
        "A row gets a (new) sequence: its sampling parameters. Earlier state of the row is void.",
        (
            Field("row", "u32", "which row"),
            Field("flags", "u32", "RowFlag"),
            Field("seed", "u64", "key of the counter-based draws"),
            Field("stream", "u32", "index of the sequence in its request (n > 1): second part of the key"),
            Field("temperature", "f32", "logits are divided by it; > 0 unless GREEDY"),
            Field("top_p", "f32", "1 = off"),
            Field("min_p", "f32", "0 = off"),
            Field("top_k", "u32", "0 = off"),
            Field("repetition_penalty", "f32", "1 = off"),
            Field("presence_penalty", "f32", "0 = off"),
            Field("frequency_penalty", "f32", "0 = off"),
            Field("num_candidates", "u32", "each sample of the row also returns its so many most likely tokens; 0 = none"),
            Field("limit", "u32", "tokens its sequence may have: the one at position limit - 1 is the last"),
        ),
    ),
    Struct(
        "TableWrite",
        "block_table[row][index] = block",
        (
            Field("row", "u32", "row of the block table"),
            Field("index", "u32", "logical block of the sequence"),
            Field("block", "u32", "physical block"),
        ),
    ),
    Struct(
        "RowFork",
        "block_table[row][:num_blocks] = block_table[parent][:num_blocks]",
        (
            Field("row", "u32", "row of the block table"),
            Field("parent", "u32", "row whose blocks it shares; no fork of the same step writes it"),
            Field("num_blocks", "u32", "logical blocks from the beginning"),
        ),
    ),
    Struct(
        "BlockCopy",
        "Copy a whole KV block, every layer, before the forward pass (copy-on-write).",
        (Field("source", "u32", "physical block read"), Field("target", "u32", "physical block written")),
    ),
    Struct(
        "BlockSwap",
        "Move a whole KV block, every layer, between the device's pool and the host's.",
        (Field("device", "u32", "physical block of the device"), Field("host", "u32", "block of the host pool")),
    ),
    Struct(
        "ResultHeader",
        "Start of a result slot.",
        (
            Field("step", "u64", "the step these results belong to"),
            Field("received_ns", "u64", "CLOCK_MONOTONIC when the data plane saw the step"),
            Field("finished_ns", "u64", "CLOCK_MONOTONIC just before publishing"),
            Field("apply_us", "u32", "time spent applying deltas"),
            Field("forward_us", "u32", "time spent in the model"),
            Field("sample_us", "u32", "time spent sampling"),
            Field("status", "u32", "StepStatus"),
            Field("num_entries", "u32", "used entries of `entries`"),
            Field("last", "u32", "1 if this is the step's last result; the step retires with it"),
            Field("num_candidates", "u32", "used entries of `candidates`"),
            Field("substep", "u32", "which of the step's substeps, from 0"),
        ),
    ),
    Struct(
        "ResultEntry",
        "One sampled token.",
        (
            Field("row", "u32", "row that sampled"),
            Field("token", "i32", "the token id"),
            Field("logprob", "f32", "natural log-probability of `token` before temperature and filters"),
            Field("rank", "u32", "1 = most likely; 0 when not asked for"),
            Field("flags", "u32", "ResultFlag"),
        ),
    ),
    Struct(
        "Candidate",
        "One of the likeliest next tokens of a row.",
        (
            Field("token", "i32", "the token id"),
            Field("logprob", "f32", "natural log-probability, of the same distribution as ResultEntry.logprob"),
        ),
    ),
)

# Regions inside one step slot and one result slot, then the segment's own.
STEP_REGIONS: tuple[Region, ...] = (
    Region("header", "StepHeader", "1", "counts"),
    Region("seqs", "SeqEntry", "max_rows", "scheduled sequences: decodes first, then chunks"),
    Region("token_ids", "i32", "max_step_tokens", "input tokens of all sequences, concatenated; NO_TOKEN = relay"),
    Region("closes", "u32", "max_rows", "rows whose sequence has left; applied first"),
    Region("opens", "RowOpen", "max_rows", "rows that get a new sequence; applied after closes"),
    Region("table_writes", "TableWrite", "max_table_writes", "deltas of the block table; applied after opens"),
    Region("forks", "RowFork", "max_rows", "tables that begin like another row's; applied after table_writes"),
    Region("swap_outs", "BlockSwap", "max_swaps", "blocks saved to the host; done before anything of this step is written"),
    Region("swap_ins", "BlockSwap", "max_swaps", "blocks restored from the host; after `swap_outs`"),
    Region("copies", "BlockCopy", "max_copies", "block copies; after the swaps, before any KV of this step is written"),
    Region("extras", "u32", "max_extra_words", "row attachments: records of {row, ExtraKind, n, n words}"),
)
RESULT_REGIONS: tuple[Region, ...] = (
    Region("header", "ResultHeader", "1", "timing and status"),
    Region("entries", "ResultEntry", "max_results", "sampled tokens"),
    Region("candidates", "Candidate", "max_candidates", "of all rows that return them, in the order of `entries`, likeliest first"),
)
SEGMENT_REGIONS: tuple[Region, ...] = (
    Region("header", "Header", "1", "constant after `ready`", PAGE),
    Region("control", "PlaneState", "1", "written by the control plane alone", PAGE),
    Region("data", "PlaneState", "1", "written by the data plane alone", PAGE),
    Region("control_bell", "Bell", "1", "the control plane sleeps here", PAGE),
    Region("data_bell", "Bell", "1", "the data plane sleeps here", PAGE),
    Region("steps", "StepSlot", "ring_depth", "control plane to data plane", PAGE),
    Region("results", "ResultSlot", "ring_depth", "data plane to control plane", PAGE),
)
