"""The simulated driver and its machine. Imports vcuda.spec only; shares no code with the interposer."""
