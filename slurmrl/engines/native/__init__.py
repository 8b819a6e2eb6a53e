"""Generation with a layout of its own, by the built-in decoder or a model of transformers."""
