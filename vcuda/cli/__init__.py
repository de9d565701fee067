"""The `vcuda` command."""
