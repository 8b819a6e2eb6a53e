"""The built-in environments of `multi_turn` episodes. Torch-free."""
