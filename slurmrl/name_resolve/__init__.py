"""The name store, through which the processes of a trial find each other."""
