"""Triton kernels of the CUDA backend, one subject per module: the kernel, and a wrapper that checks its arguments.

Does not choose between implementations and does not know models, caches or plans: wrappers take tensors. Imports
without a GPU and without a driver. Written for Triton 3.6 to 3.9.
"""

import os

# Fused multiply-adds: on by default in Triton 3.6, off in 3.9, which warns if this is unset. Set it for both.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
