"""Datasets, models and tokenizers of the Hugging Face hub, fetched on the login node.

A reference (``hf://org/name@revision``) becomes a folder in a cache under the root of the runs,
made for one commit of the repository: later trials and jobs read that folder, and need no network.
The hub's own library runs in a child process (`child`). Torch-free.
"""
