"""Settings of a server, read once at start-up and checked once; one file for each kind."""
