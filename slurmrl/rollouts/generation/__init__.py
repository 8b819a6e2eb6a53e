"""Engines that serve generation requests."""
