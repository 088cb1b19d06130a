"""The contract between the planes (PROTOCOL.md), and what both need: configuration and logging."""
