"""Settings: what each is, how its text is read, from where, and read anew while the daemon runs."""
