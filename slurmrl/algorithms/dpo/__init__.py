"""Direct preference optimisation."""
