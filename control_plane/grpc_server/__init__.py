"""The public gRPC service, package twinplane.v1."""
