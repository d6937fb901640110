"""`python -m attnlab` is the command line `attnlab`."""

import sys

from attnlab.cli import main

sys.exit(main())
