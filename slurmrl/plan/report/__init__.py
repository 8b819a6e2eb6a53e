"""The report of a plan: JSON values, text and SVG."""
