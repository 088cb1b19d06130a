"""Makes the helper modules of this folder importable: in importlib mode pytest adds no test folder to the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
