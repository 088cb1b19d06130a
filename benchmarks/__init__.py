"""Benchmarks of Twinplane's parts; the quick ones are also commands of ``twinplane bench``."""
