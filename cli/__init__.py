"""The ``twinplane`` command."""

EXIT_USAGE = 2  # the command line is not understood
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: understood, but the settings are wrong
