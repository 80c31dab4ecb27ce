// Stands in for CUDA's header of this name: what csrc/cuda/split.cpp calls of the driver, played by ../driver.cpp on the
// host. Names, numbers and signatures are CUDA's.
#pragma once

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
  CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
};

using CUdevice = int;
using CUstream = struct CUstream_st*;
using CUgreenCtx = struct CUgreenCtx_st*;
using CUdevResourceDesc = struct CUdevResourceDesc_st*;

enum CUdevResourceType { CU_DEV_RESOURCE_TYPE_INVALID = 0, CU_DEV_RESOURCE_TYPE_SM = 1 };
enum CUgreenCtxCreate_flags { CU_GREEN_CTX_DEFAULT_STREAM = 1 };
enum CUstream_flags { CU_STREAM_NON_BLOCKING = 1 };

struct CUdevSmResource {
  unsigned smCount;
};

struct CUdevResource {
  CUdevResourceType type;
  unsigned char _internal_padding[92];
  CUdevSmResource sm;
};
