"""The native engine: a decoder in this process with continuous batching over a paged cache."""
