"""s2-megatron with the given arguments."""

import sys


def main():
    from s2_megatron.tools import commands

    status = commands.main(sys.argv[1:])
    assert status == 0, status


if __name__ == "__main__":
    main()
