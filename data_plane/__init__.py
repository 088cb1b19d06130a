"""The plane that computes: worker loop, devices, models, paged KV cache, sampler."""
