"""Ask the C library to keep freed memory: a step's large temporaries are then the last step's, page by page."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGEST = 32 << 20  # the most that glibc takes for the second


def keep_freed_memory() -> bool:
    """Memory up to 32 MiB a piece stays with the process when it is freed; True if the C library was told.

    Otherwise glibc returns large pieces to the system at once, and a tensor of 2 MB that is made anew in every layer
    costs ten times its own copying in page faults.  Only glibc is asked; the process may hold the memory of its
    largest step until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, 0x7FFFFFFF))
