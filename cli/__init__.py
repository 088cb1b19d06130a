"""The ``twinplane`` command."""
