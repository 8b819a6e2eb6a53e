"""The name store, by which the processes of a trial find each other."""
