"""Reward models: training on pairs, and judging completions."""
