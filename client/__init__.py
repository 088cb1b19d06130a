"""A small typed client for Twinplane's gRPC API."""
