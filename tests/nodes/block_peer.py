"""A process with blocks over NIXL: serves them (`serve`) until its input ends, or reads those at an endpoint for ever
(`read ENDPOINT`). Says where, or when it has begun, in a line."""

from __future__ import annotations

import sys

import numpy as np

from hydra_engine.core.pools import PoolKind
from tests.nodes.blocks import SLOT, WORD, network, nixl_above

NUM_BLOCKS, BLOCK_BYTES = 256, 1 << 16


def main() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    blocks = nixl_above(network(sys.argv[1]))
    if sys.argv[1] == "serve":
        print(blocks.serve({PoolKind.KV: rows}, lambda slot: WORD, 16), flush=True)
        sys.stdin.read()
        blocks.close()
        return
    remote = blocks.open("serve", sys.argv[2])
    ids = np.arange(NUM_BLOCKS, dtype=np.int32)
    remote.read(PoolKind.KV, ids, np.empty_like(rows), ids, SLOT, WORD)
    print("reads", flush=True)
    while True:
        remote.read(PoolKind.KV, ids, np.empty_like(rows), ids, SLOT, WORD)


if __name__ == "__main__":
    main()
