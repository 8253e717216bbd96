"""`python -m caldrix_client` is the command `caldrix`."""

import sys

from caldrix_client.main import main

sys.exit(main())
