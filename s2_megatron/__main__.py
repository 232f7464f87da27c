"""`python -m s2_megatron` is the command `s2-megatron`."""

import sys

from s2_megatron.tools.commands import main

if __name__ == "__main__":
    sys.exit(main())
