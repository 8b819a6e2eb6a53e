"""Compiled operators, which are built from ``cuda/`` on first use, once per host, and cached.

The CPU half needs a C++ compiler, and the CUDA half also needs nvcc. Without these compilers,
callers compute in pure torch.
"""
