"""`python3 deploy/cloud COMMAND`: see commands.py."""

import sys

from commands import main

sys.exit(main())
