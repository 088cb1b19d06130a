"""Entry point of the ``twinplane`` command."""


def main() -> int:
    raise SystemExit("not built yet")
