"""`python -m perf.trtllm_suite`: see command.py."""

import sys

from perf.trtllm_suite.command import main

if __name__ == "__main__":
    sys.exit(main())
