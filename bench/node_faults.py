"""Hosts killed, cut off and slow while requests run over Ray (`tests/campaigns/node_faults.py`)."""

from tests.campaigns.node_faults import main

if __name__ == "__main__":
    main()
