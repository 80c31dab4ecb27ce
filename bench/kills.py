"""Instances killed or stopped at random moments while requests run (`tests/campaigns/kills.py`)."""

from tests.campaigns.kills import main

if __name__ == "__main__":
    main()
