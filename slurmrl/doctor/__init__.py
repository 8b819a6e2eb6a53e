"""Whether this place can run trials: checks from the login node and from inside a short job.

One file for each kind of check; a check measures something and says what to do about it. To add
one, write a function that returns a `Check` and name it in `login` or `host`.
"""
