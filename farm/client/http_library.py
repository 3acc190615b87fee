"""httpx without its own command line, which takes three times as long to import as the rest (rich, pygments)."""

import sys

_COMMAND_LINE = "httpx._main"
_is_first = "httpx" not in sys.modules and _COMMAND_LINE not in sys.modules

if _is_first:
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment] # It counts as missing, which httpx provides for.
try:
    import httpx
finally:
    if _is_first:
        del sys.modules[_COMMAND_LINE]

__all__ = ["httpx"]
