"""Supervised fine-tuning on prompt-answer pairs."""
