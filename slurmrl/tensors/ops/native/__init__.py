"""Compiled operators: built from ``cuda/`` on first use, once per host, and cached.

The CPU half needs a C++ compiler, the CUDA half nvcc as well; without them callers use their pure
torch form.
"""
