"""How the native parts are compiled: one source list, gcc only, no CUDA toolkit, no network."""
