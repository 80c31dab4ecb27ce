"""The same requests over every topology, and their tokens (`tests/campaigns/equality.py`)."""

from tests.campaigns.equality import main

if __name__ == "__main__":
    main()
