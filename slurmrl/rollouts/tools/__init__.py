"""The built-in tools, and how tools are called. Torch-free."""
