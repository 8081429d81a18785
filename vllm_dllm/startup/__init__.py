"""The start of a server: the installation, the arguments, the model's folder, and the last line."""
