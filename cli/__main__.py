"""``python -m twinplane.cli``: the same as the ``twinplane`` command."""

from twinplane.cli.main import main

raise SystemExit(main())
