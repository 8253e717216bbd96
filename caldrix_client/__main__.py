"""`python -m caldrix_client` is the command `caldrix`."""

from caldrix_client.main import main

main()
