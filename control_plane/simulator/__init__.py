"""Capacity questions answered before hardware is bought: the production scheduler on a virtual clock. See docs/simulator.md."""

# What can be simulated. Here, so that the command line can name them without loading anything.
SYSTEMS = {
    "twinplane": "the production scheduler",
    "prefill-first": "paged, whole prompts first in steps of their own, scheduled in Python one step at a time",
    "orca-max": "iteration-level batching, contiguous memory for the longest sequence there can be",
    "orca-pow2": "the same, for the prompt and the next power of two of the output",
    "orca-oracle": "the same, for exactly what will be needed",
    "static": "request-level batching with padding",
}

FORMATS = {
    "azure-original": "csv of AzurePublicDataset, as published: TIMESTAMP,ContextTokens,GeneratedTokens",
    "azure": "csv t_ms,in,out: arrival in ms, prompt and output tokens",
    "lengths": "csv in,out: prompt and output tokens, no times",
    "multiturn": "csv in,out of turns in conversation order, in = all before it; looks like lengths, so it has to be named",
    "mooncake": "jsonl of Mooncake's FAST '25 traces: timestamp, input_length, output_length, hash_ids",
    "agentic": "jsonl of coding agents' conversations: block, reqs with run-length hash ids",
    "twinplane": "jsonl of our own: arrival_s, prompt_tokens, output_tokens, prefix, n, tenant, priority",
}
