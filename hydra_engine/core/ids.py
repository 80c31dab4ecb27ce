"""Typed identities. Internal ids are always ours; a client's request id is only echoed, never used as a key."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)
BlockId = NewType("BlockId", int)
StepId = NewType("StepId", int)
InstanceId = NewType("InstanceId", str)
BlockHash = NewType("BlockHash", bytes)  # 32 bytes, BLAKE2b over the chain of blocks before it
ImageDigest = NewType("ImageDigest", bytes)  # 32 bytes, BLAKE2b over the processed picture, see intake/preprocess.py
FeatureKey = NewType("FeatureKey", bytes)  # what the features of an image are known by, see cache/prefix.py
