"""Makes `python -m gradacc_jax` the command `gradacc`."""

import sys

from gradacc_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
