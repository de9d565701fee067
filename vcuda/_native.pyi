"""Typing of the cffi module: `ffi` and `lib` are dynamic; `vcuda.region` and `vcuda.arbiter` are the typed faces."""

from typing import Any

ffi: Any
lib: Any
