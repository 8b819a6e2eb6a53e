"""Generation of completions, shared by algorithms."""
