"""The subcommands: `serve`, `explain`, `simulate` and `defrag`, each with its options and its output."""
