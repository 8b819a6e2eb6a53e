"""The plan as users see it: JSON values, text and SVG."""
