"""Compiled operators: built from ``cuda/`` on first use, once per host, and kept in a cache.

The CPU half needs a C++ compiler and the CUDA half nvcc as well; where one cannot be had, callers
take their pure torch form.
"""
