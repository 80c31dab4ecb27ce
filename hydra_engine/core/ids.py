"""Typed identities. Internal ids are assigned by the engine; a client's request id is echoed, never used as a key."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)
StepId = NewType("StepId", int)
BlockHash = NewType("BlockHash", bytes)  # 32 bytes, BLAKE2b over the chain of blocks before it
ImageDigest = NewType("ImageDigest", bytes)  # 32 bytes, BLAKE2b over the processed picture (preprocess/media)
FeatureKey = NewType("FeatureKey", bytes)  # key of an image's features in the cache, see cache/hashes.py
