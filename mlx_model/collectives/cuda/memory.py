"""Memory of one GPU that processes with other GPUs of the machine write into, by CUDA's driver.

MLX has no way to share its own arrays. Each rank allocates one piece, sends the others its handle, and opens theirs
(CUDA driver API, "IPC"): what is opened is reached over NVLink or PCIe, as NCCL reaches it. It stays for the process.
"""

from __future__ import annotations

import ctypes
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaError(Exception):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class SharedMemory:
    """A piece of this process's first GPU, zeroed, and how others find it."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes; CudaError if the driver has no such memory."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(str(error)) from error
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # MLX's own
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        self.address = int(address.value)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(memoryview(handle))

    def opened(self, handle: bytes) -> int:
        """Where this process reaches another rank's piece; CudaError when it cannot."""
        address = ctypes.c_uint64()
        theirs = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return int(address.value)

    def free(self) -> None:
        """Free it; no other process has opened it or uses it."""
        self._call("cuMemFree_v2", ctypes.c_uint64(self.address))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise CudaError(f"this CUDA driver has no {name}")
        if status := function(*arguments):
            raise CudaError(f"{name}: error {status} of the CUDA driver")
