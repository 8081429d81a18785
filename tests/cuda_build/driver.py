"""A CUDA driver that knows no GPU: vLLM's and Triton's libraries are linked against `libcuda.so.1`,
and load only where there is one."""

import ctypes
import os
import subprocess
from pathlib import Path

FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, what all of them answer


def load(folder: Path) -> None:
    """Compiles it into `folder` and loads it: libraries that need one of that name find it loaded,
    wherever the linker would look."""
    library, source = folder / "libcuda.so.1", folder / "libcuda.c"
    source.write_text("".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in FUNCTIONS))
    name = f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", "-shared", "-fPIC", name, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["LD_LIBRARY_PATH"] = str(folder)  # for processes that an engine starts
