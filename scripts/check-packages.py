"""Says in one line which packages the present environment lacks; `make ... VENV=` asks before it runs anything.

Only the standard library is imported: nothing is loaded to find out whether it is there.
"""

import importlib.util
import sys

# import name -> how pip calls it
PACKAGES = {
    "torch": "torch",
    "megatron.training": "'megatron-core[training]>=0.19.2,<0.21'",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "rich": "rich",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
}


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


missing = [package for name, package in PACKAGES.items() if not is_there(name)]
if missing:
    sys.exit(
        f"{sys.executable} lacks packages: pip install {' '.join(missing)}; or leave VENV= out, and make installs them "
        "into .venv"
    )
