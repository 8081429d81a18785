"""Settings of a server, read and checked once at start-up. One file for each kind."""
