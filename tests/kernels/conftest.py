"""Makes the helper modules of this folder importable: in importlib mode pytest adds no test folder to the path.

Only this folder: with its parent on the path, a bare ``kernels`` would be importable, which transformers reacts to.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
