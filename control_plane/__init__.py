"""The plane that decides: scheduler core, engine facade, gRPC front, text."""
