"""Training loops to read and to copy from."""
