"""What a process does before there is an engine: the installation, the arguments, the last line."""
